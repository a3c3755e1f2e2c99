/* Rows of a weight merged with a low-rank update, byte for byte as muster.shardcast.adapter does.
 *
 * Every product and every sum is rounded by itself, in the order of the ranks. A compiler that made
 * one instruction of both would make other bytes, so it is told not to.
 */

#include <float.h>

#if FLT_EVAL_METHOD != 0
#error "floats have excess precision here, so merged weights would be other bytes"
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__) && __GNUC__ >= 12 && !defined(WIDEST_VECTORS)
/* One copy per instruction set, chosen when the library is loaded. */
#define WIDEST_VECTORS \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif !defined(WIDEST_VECTORS)
#define WIDEST_VECTORS
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define ROUND_EACH __attribute__((optimize("fp-contract=off")))
#else
#define ROUND_EACH
#endif

/* Columns at a time: their sums, and these columns of A, stay in a core's first cache. */
enum { STRIP = 512 };

/* `base` and `made` hold rows x columns numbers of `width` bytes: 2 for bfloat16, 4 for float32.
 * `up` is B, scaled, [rows, rank]; `down` is A, [rank, columns]. */
WIDEST_VECTORS ROUND_EACH
EXPORT void muster_merge(const void *base, int64_t rows, int64_t columns, int32_t width,
                         const float *up, const float *down, int64_t rank, void *made) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    union { float numbers[STRIP]; uint32_t bits[STRIP]; } sum, old;
    for (int64_t first = 0; first < columns; first += STRIP) {
        int64_t count = columns - first < STRIP ? columns - first : STRIP;
        for (int64_t row = 0; row < rows; row++) {
            int64_t place = row * columns + first;
            const uint16_t *narrow = (const uint16_t *)base + place;
            uint16_t *rounded = (uint16_t *)made + place;
            memset(sum.numbers, 0, sizeof sum.numbers);
            for (int64_t k = 0; k < rank; k++) {
                float factor = up[row * rank + k];
                const float *part = down + k * columns + first;
                for (int64_t i = 0; i < count; i++) sum.numbers[i] += factor * part[i];
            }
            if (width == 4) memcpy(old.bits, (const uint32_t *)base + place, 4 * (size_t)count);
            else for (int64_t i = 0; i < count; i++) old.bits[i] = (uint32_t)narrow[i] << 16;
            for (int64_t i = 0; i < count; i++) sum.numbers[i] = old.numbers[i] + sum.numbers[i];
            for (int64_t i = 0; i < count; i++)
                if ((sum.bits[i] & 0x7FFFFFFF) > 0x7F800000) sum.bits[i] = 0x7FC00000;
            if (width == 4) memcpy((uint32_t *)made + place, sum.bits, 4 * (size_t)count);
            else for (int64_t i = 0; i < count; i++) /* to the nearest, ties to even */
                rounded[i] = (uint16_t)((sum.bits[i] + 0x7FFF + (sum.bits[i] >> 16 & 1)) >> 16);
        }
    }
}
