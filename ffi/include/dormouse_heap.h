/*
 * Functions of libdormouse.so that libdormouse_preload.so calls. Private, not installed.
 * Contract of malloc: any thread; on failure NULL with errno, no status, no message.
 */
#ifndef DORMOUSE_HEAP_H
#define DORMOUSE_HEAP_H

#include <stddef.h>
#include <stdint.h>

/* Address range of all blocks, [begin, end), both 0 without a heap. The end may fall. Requests of at least min_bytes
 * are served; SIZE_MAX: none. Written by the library, read with relaxed loads. */
typedef struct dormouse_heap_span {
    uintptr_t begin;
    uintptr_t end;
    size_t min_bytes;
} dormouse_heap_span;

const dormouse_heap_span *dormouse_heap_range(void);
void *dormouse_heap_malloc(size_t bytes);
void *dormouse_heap_calloc(size_t count, size_t bytes);
void *dormouse_heap_realloc(void *pointer, size_t bytes);
void dormouse_heap_free(void *pointer);
void *dormouse_heap_aligned_alloc(size_t align, size_t bytes);
size_t dormouse_heap_usable_size(void *pointer);
int dormouse_heap_trim(size_t pad);
/* Called before the process sets this struct rlimit for RLIMIT_AS. */
void dormouse_heap_limit(const void *limit);

#endif
