/* Makes a runtime from the environment and says what came of it: the runner sets the environment
 * and reads the answer. */
#include "check.h"

int main(void)
{
    dormouse_runtime_t *runtime = NULL;
    dormouse_param_t param;
    uint32_t count = 0;
    void *large = malloc((size_t)1 << 20); /* the heap's door, if there is a preload library */
    dormouse_status_t status = dormouse_runtime_create(NULL, &runtime);

    printf("%s\n", dormouse_get_status_string(status));
    if (status != DORMOUSE_OK) {
        printf("%s\n", dormouse_get_last_error());
        EXPECT(runtime == NULL && large != NULL);
    } else {
        dormouse_info_t info;
        DORMOUSE_INIT(&info);
        OK(dormouse_runtime_get_info(runtime, &info));
        printf("doors %llu\nclosed: %s\n", (unsigned long long)info.doors, info.closed_because);
        OK(dormouse_param_count(&count));
        for (uint32_t at = 0; at < count; at++) {
            DORMOUSE_INIT(&param);
            OK(dormouse_param_get(at, &param));
            printf("%s = %s [%d] %s\n", param.name, param.value, (int)param.provenance, param.kind);
        }
        DORMOUSE_INIT(&param);
        GIVES(dormouse_param_get(count, &param), DORMOUSE_ERR_ARGUMENT, "are accepted");
        OK(dormouse_runtime_destroy(runtime));
    }
    free(large);
    return failures == 0 ? 0 : 1;
}
