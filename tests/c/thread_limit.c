/* A limit of threads is named by the error; the directory of the tier is not blamed. The argument is
 * that directory. Root is exempt from the limit, so it becomes another user. */
#include "check.h"

#include <sys/resource.h>
#include <sys/stat.h>

#define NOBODY 65534

int main(int argc, char **argv)
{
    struct rlimit limit = {1, 1};
    dormouse_runtime_t *runtime = NULL;
    dormouse_options_t options;

    EXPECT(argc > 1 && chdir(argv[1]) == 0 && chmod(".", 0777) == 0);
    DORMOUSE_INIT(&options);
    /* Relative: the other user may not be able to enter the folders above. */
    options.nvme_dir = ".";
    options.nvme_file_bytes = 16 << 20;
    EXPECT(setrlimit(RLIMIT_NPROC, &limit) == 0);
    if (geteuid() == 0) {
        EXPECT(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    }
    RETURNS(dormouse_runtime_create(&options, &runtime), DORMOUSE_ERR_LIMIT, "ulimit -u");
    EXPECT(strstr(dormouse_get_last_error(), "NVME_DIR") == NULL);
    return done("thread_limit");
}
