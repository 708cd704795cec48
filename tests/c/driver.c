/* A library with the name of the driver and none of its functions, which allocates when it is loaded. */
#include <stdlib.h>

#define LARGE_BYTES (8 << 20)

static void *volatile taken;

__attribute__((constructor)) static void load(void)
{
    taken = malloc(LARGE_BYTES);
    setenv("DRIVER_TOOK", "memory", taken != NULL);
}
