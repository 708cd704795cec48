/*
 * Private to libdormouse_preload.so; not installed. What the shim calls in libdormouse.so.
 * The contract is malloc's: NULL with errno on failure; any thread; no status, no sentence.
 */
#ifndef DORMOUSE_HEAP_H
#define DORMOUSE_HEAP_H

#include <stddef.h>
#include <stdint.h>

/* Where blocks lie: [begin, end), both 0 until there is a heap; requests of at least min_bytes
 * are served, SIZE_MAX closes the door. Written by the library, read with relaxed loads. */
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

#endif
