/* Damages the file of the NVMe tier: the wake fails with a typed error, damaged data is not returned,
 * and other data stays intact. The file is unlinked, so it is opened through /proc/self/fd. */
#include "check.h"

#include <sys/stat.h>

#define BYTES ((size_t)2 << 20)

/* Opens the library's file again, writable and without O_DIRECT. */
static int the_file(const char *dir)
{
    char path[64], target[4096];
    for (int fd = 3; fd < 1024; fd++) {
        ssize_t length;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        length = readlink(path, target, sizeof target - 1);
        if (length <= 0) {
            continue;
        }
        target[length] = '\0';
        if (strncmp(target, dir, strlen(dir)) == 0 && strstr(target, "(deleted)") != NULL) {
            return open(path, O_RDWR | O_CLOEXEC);
        }
    }
    return -1;
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "/var/tmp";
    const char *how = argc > 2 ? argv[2] : "corrupt";
    dormouse_runtime_t *runtime = runtime_in(dir, 16);
    dormouse_tag_t *tag = NULL, *healthy = NULL;
    void *block = NULL, *other = NULL;
    struct stat about;
    int fd;

    OK(dormouse_tag_create(runtime, "hurt", 0, &tag));
    OK(dormouse_tag_create(runtime, "healthy", 0, &healthy));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &other));
    fill((unsigned char *)block, BYTES, 1);
    fill((unsigned char *)other, BYTES, 2);
    OK(dormouse_tag_add(tag, block, BYTES));
    OK(dormouse_tag_add(healthy, other, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL));

    fd = the_file(dir);
    EXPECT(fd >= 0);
    EXPECT(fstat(fd, &about) == 0 && about.st_nlink == 0 && (about.st_mode & 0777) == 0600);
    if (strcmp(how, "truncate") == 0) {
        EXPECT(ftruncate(fd, 0) == 0);
    } else {
        char garbage[4096];
        memset(garbage, 0x5a, sizeof garbage);
        for (off_t at = 0; at < about.st_size; at += sizeof garbage) {
            EXPECT(pwrite(fd, garbage, sizeof garbage, at) == sizeof garbage);
        }
        EXPECT(fsync(fd) == 0);
    }
    RETURNS(dormouse_tag_wake(tag, NULL), DORMOUSE_ERR_CORRUPT, "");
    EXPECT(state_of(runtime, block) == DORMOUSE_STATE_NVME); /* not returned */
    EXPECT(is_filled((unsigned char *)other, BYTES, 2));
    if (strcmp(how, "truncate") != 0) {
        OK(dormouse_tag_sleep(healthy, DORMOUSE_TIER_NVME, NULL)); /* the file is still usable */
        OK(dormouse_tag_wake(healthy, NULL));
        EXPECT(is_filled((unsigned char *)other, BYTES, 2));
    }
    OK(dormouse_mem_free(runtime, block, NULL)); /* lost data can be freed */
    OK(dormouse_tag_destroy(tag));
    OK(dormouse_tag_destroy(healthy));
    OK(dormouse_mem_free(runtime, other, NULL));
    OK(dormouse_runtime_destroy(runtime));
    return done("damage");
}
