/* Stands in for the header of the same name, which the CUDA runtime's own headers include and
 * which comes with the compiler, not with the runtime: attributes that mean nothing to cc. */
#ifndef STANDIN_CRT_HOST_DEFINES_H
#define STANDIN_CRT_HOST_DEFINES_H

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __host__

#endif
