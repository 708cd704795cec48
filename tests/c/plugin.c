/* A host that is not linked to the library: it loads it with dlopen, with its symbols kept local, and finds every
 * function through dormousePlugin_v1. */
#include <dormouse.h>

#include <dlfcn.h>
#include <stdio.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

typedef uint32_t (*get_version_t)(void);
typedef dormouse_status_t (*create_t)(const dormouse_options_t *, dormouse_runtime_t **);
typedef dormouse_status_t (*destroy_t)(dormouse_runtime_t *);

int main(int argc, char **argv)
{
    EXPECT(argc == 2);
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    EXPECT(library != NULL);
    const dormouse_plugin_v1_t *plugin = (const dormouse_plugin_v1_t *)dlsym(library, "dormousePlugin_v1");
    EXPECT(plugin != NULL && plugin->size == sizeof *plugin);
    EXPECT(plugin->abi_version == DORMOUSE_STRUCT_VERSION && strcmp(plugin->name, "dormouse") == 0);

    get_version_t get_version = (get_version_t)plugin->get_proc("dormouse_get_version");
    create_t create = (create_t)plugin->get_proc("dormouse_runtime_create");
    destroy_t destroy = (destroy_t)plugin->get_proc("dormouse_runtime_destroy");
    EXPECT(get_version != NULL && create != NULL && destroy != NULL);
    EXPECT(get_version() == DORMOUSE_VERSION);
    dormouse_runtime_t *runtime = NULL;
    EXPECT(create(NULL, &runtime) == DORMOUSE_OK && runtime != NULL);
    EXPECT(destroy(runtime) == DORMOUSE_OK);

    /* Functions of the header alone: not those of libc, of the preload library, or data. */
    static const char *const others[] = {
        "dormouse_no_such", "dormouse_heap_malloc", "dormousePlugin_v1", "malloc", "",
    };
    for (size_t at = 0; at < sizeof others / sizeof *others; at++) {
        EXPECT(plugin->get_proc(others[at]) == NULL);
    }
    EXPECT(plugin->get_proc(NULL) == NULL);
    printf("plugin: all checks passed\n");
    return 0;
}
