/* What differs between compilers, and the constants all parts share. */

#ifndef MUSTER_TOPLOC_PORTABLE_H
#define MUSTER_TOPLOC_PORTABLE_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "doubles have excess precision here, so rounding to integers would fail"
#endif

#if defined(WIDEST_VECTORS)
/* Set from outside, to try one instruction set. */
#elif defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__) && __GNUC__ >= 12
/* One copy per instruction set, chosen when the library is loaded. */
#define WIDEST_VECTORS \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST_VECTORS
#endif

#if defined(__GNUC__)
/* Inlined always, so that every copy above gets vectors of its own width. */
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#define PRIME 65497u

enum { OK, NOT_FINITE, NO_MEMORY, NO_MODULUS, BAD_MODULUS, BAD_COEFFICIENT };

/* Parts of a bfloat16 pattern. */
enum { SIGN_SHIFT = 15, MAGNITUDE = 0x7FFF, EXPONENT = 0x7F80, MANTISSA = 0x007F };

#endif
