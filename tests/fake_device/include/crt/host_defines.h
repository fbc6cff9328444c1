// The pip wheels of CUDA's runtime come without this header. For a compiler of the host, these few
// macros are all that the headers of the API use; where the real one is installed, it is found
// first.
#pragma once
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __specialization_static static
