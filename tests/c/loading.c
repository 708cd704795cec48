/* A driver that calls malloc while a GPU's heap is created: the same thread creates the host's heap
 * meanwhile. Runs under the preload library, with `driver.c` as the driver. */
#include "check.h"

#define PATIENCE_S 20

int main(void)
{
    alarm(PATIENCE_S); /* ends a deadlock */
    EXPECT(dormouse_torch_pool_malloc(1 << 20, 0, NULL) == NULL);
    EXPECT(strstr(dormouse_get_last_error(), "CUDA") != NULL);
    EXPECT(getenv("DRIVER_TOOK") != NULL);
    return done("loading");
}
