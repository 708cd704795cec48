/* Creates a runtime from the environment and prints the outcome. The runner sets the environment and
 * checks the output. */
#include "check.h"

int main(void)
{
    dormouse_runtime_t *runtime = NULL;
    dormouse_param_t param;
    uint32_t count = 0;
    void *large = malloc((size_t)1 << 20); /* creates the heap under the preload library */
    dormouse_status_t status = dormouse_runtime_create(NULL, &runtime);

    printf("%s\n", dormouse_get_status_string(status));
    if (status != DORMOUSE_OK) {
        printf("%s\n", dormouse_get_last_error());
        EXPECT(runtime == NULL && large != NULL);
    } else {
        dormouse_info_t info;
        DORMOUSE_INIT(&info);
        OK(dormouse_runtime_get_info(runtime, &info));
        printf("modes %llu\ntier flags %llu\nunavailable: %s\n", (unsigned long long)info.modes,
               (unsigned long long)info.tier_flags, info.unavailable_reason);
        for (;; count++) {
            DORMOUSE_INIT(&param);
            if (dormouse_param_get(count, &param) != DORMOUSE_OK) {
                break;
            }
            printf("%s = %s [%d] %s; %s\n", param.name, param.value, (int)param.provenance, param.kind,
                   param.reason);
        }
        EXPECT(count > 0);
        RETURNS(dormouse_param_get(count, &param), DORMOUSE_END, "accepted: 0 to");
        EXPECT(param.name == NULL);
        OK(dormouse_runtime_destroy(runtime));
    }
    free(large);
    return failures == 0 ? 0 : 1;
}
