/* A driver that takes memory of malloc while a GPU's heap is being made: the host's heap is made
 * meanwhile, by the same thread. Run under the preload library, with `driver.c` for a driver. */
#include "check.h"

#define PATIENCE_S 20

int main(void)
{
    alarm(PATIENCE_S); /* who waits for itself waits for ever */
    EXPECT(dormouse_torch_pool_malloc(1 << 20, 0, NULL) == NULL);
    EXPECT(strstr(dormouse_get_last_error(), "CUDA") != NULL);
    EXPECT(getenv("DRIVER_TOOK") != NULL);
    return done("loading");
}
