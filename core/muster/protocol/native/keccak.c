/* Keccak-256 as in the EVM, SHAKE-256 of FIPS 202, and the leaves and parents of
 * muster.tasks.line_tree.
 *
 * Data come from strangers: whatever `data` holds, this reads within `size` bytes, writes at most
 * `room` leaves and ends after one pass. Little-endian machines only; the loader checks.
 */

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define RATE 136 /* bytes taken in per permutation */
#define HASH 32

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST ""
#endif
/* Digest of the sources that this was compiled from, which the loader checks. */
EXPORT const char muster_keccak_source[65] = SOURCE_DIGEST;

enum { TOO_LONG = -1, NO_ROOM = -2 };

static const uint64_t ROUND[24] = {
    0x0000000000000001, 0x0000000000008082, 0x800000000000808a, 0x8000000080008000,
    0x000000000000808b, 0x0000000080000001, 0x8000000080008081, 0x8000000000008009,
    0x000000000000008a, 0x0000000000000088, 0x0000000080008009, 0x000000008000000a,
    0x000000008000808b, 0x800000000000008b, 0x8000000000008089, 0x8000000000008003,
    0x8000000000008002, 0x8000000000000080, 0x000000000000800a, 0x800000008000000a,
    0x8000000080008081, 0x8000000000008080, 0x0000000080000001, 0x8000000080008008};

static inline uint64_t rol(uint64_t x, int n) { return x << n | x >> (64 - n); }

/* Theta, rho and pi of one lane: a[from], with its column's parity t, rotated, becomes b[to]. */
#define LANE(to, from, column, n) uint64_t b##to = rol(a[from] ^ t##column, n)
#define CHI(i, v, w, x, y, z)                                                                      \
    a[i] = b##v ^ (~b##w & b##x);                                                                  \
    a[i + 1] = b##w ^ (~b##x & b##y);                                                              \
    a[i + 2] = b##x ^ (~b##y & b##z);                                                              \
    a[i + 3] = b##y ^ (~b##z & b##v);                                                              \
    a[i + 4] = b##z ^ (~b##v & b##w)

static void permute(uint64_t a[25]) {
    for (int round = 0; round < 24; round++) {
        uint64_t c0 = a[0] ^ a[5] ^ a[10] ^ a[15] ^ a[20], c1 = a[1] ^ a[6] ^ a[11] ^ a[16] ^ a[21];
        uint64_t c2 = a[2] ^ a[7] ^ a[12] ^ a[17] ^ a[22], c3 = a[3] ^ a[8] ^ a[13] ^ a[18] ^ a[23];
        uint64_t c4 = a[4] ^ a[9] ^ a[14] ^ a[19] ^ a[24];
        uint64_t t0 = c4 ^ rol(c1, 1), t1 = c0 ^ rol(c2, 1), t2 = c1 ^ rol(c3, 1);
        uint64_t t3 = c2 ^ rol(c4, 1), t4 = c3 ^ rol(c0, 1);
        uint64_t b0 = a[0] ^ t0;
        LANE(1, 6, 1, 44);
        LANE(2, 12, 2, 43);
        LANE(3, 18, 3, 21);
        LANE(4, 24, 4, 14);
        LANE(5, 3, 3, 28);
        LANE(6, 9, 4, 20);
        LANE(7, 10, 0, 3);
        LANE(8, 16, 1, 45);
        LANE(9, 22, 2, 61);
        LANE(10, 1, 1, 1);
        LANE(11, 7, 2, 6);
        LANE(12, 13, 3, 25);
        LANE(13, 19, 4, 8);
        LANE(14, 20, 0, 18);
        LANE(15, 4, 4, 27);
        LANE(16, 5, 0, 36);
        LANE(17, 11, 1, 10);
        LANE(18, 17, 2, 15);
        LANE(19, 23, 3, 56);
        LANE(20, 2, 2, 62);
        LANE(21, 8, 3, 55);
        LANE(22, 14, 4, 39);
        LANE(23, 15, 0, 41);
        LANE(24, 21, 1, 2);
        CHI(0, 0, 1, 2, 3, 4);
        CHI(5, 5, 6, 7, 8, 9);
        CHI(10, 10, 11, 12, 13, 14);
        CHI(15, 15, 16, 17, 18, 19);
        CHI(20, 20, 21, 22, 23, 24);
        a[0] ^= ROUND[round];
    }
}

static void take_in(uint64_t state[25], const uint8_t block[RATE]) {
    uint64_t lanes[RATE / 8];
    memcpy(lanes, block, RATE);
    for (int i = 0; i < RATE / 8; i++)
        state[i] ^= lanes[i];
    permute(state);
}

/* Takes in all data and the padding, whose first byte says which function it is. */
static void absorb(uint64_t state[25], const uint8_t *data, int64_t size, uint8_t padding) {
    uint8_t last[RATE] = {0};
    for (; size >= RATE; data += RATE, size -= RATE)
        take_in(state, data);
    if (size)
        memcpy(last, data, (size_t)size);
    last[size] ^= padding;
    last[RATE - 1] ^= 0x80;
    take_in(state, last);
}

EXPORT void muster_keccak256(const uint8_t *data, int64_t size, uint8_t out[HASH]) {
    uint64_t state[25] = {0};
    absorb(state, data, size, 0x01);
    memcpy(out, state, HASH);
}

EXPORT void muster_shake256(const uint8_t *data, int64_t size, uint8_t *out, int64_t room) {
    uint64_t state[25] = {0};
    absorb(state, data, size, 0x1f);
    for (; room > RATE; out += RATE, room -= RATE) {
        memcpy(out, state, RATE);
        permute(state);
    }
    memcpy(out, state, (size_t)room);
}

/* Writes the leaf and the end (exclusive, without the line break) of every line that ends in a line
 * break; the first line has the number `first`. Returns the number of lines, or a fault. */
EXPORT int64_t muster_lines_leaves(const uint8_t *data, int64_t size, uint64_t first,
                                   int64_t max_line, uint8_t *leaves, uint64_t *ends,
                                   int64_t room) {
    int64_t count = 0;
    for (int64_t start = 0; start < size; count++) {
        const uint8_t *found = memchr(data + start, '\n', (size_t)(size - start));
        int64_t length = found ? found - (data + start) : size - start;
        if (length > max_line)
            return TOO_LONG;
        if (!found)
            break;
        if (count == room)
            return NO_ROOM;
        uint8_t leaf[HASH + 8];
        muster_keccak256(data + start, length, leaf);
        for (int i = 0; i < 8; i++)
            leaf[HASH + i] = (uint8_t)((first + (uint64_t)count) >> (56 - 8 * i));
        muster_keccak256(leaf, sizeof leaf, leaves + HASH * count);
        ends[count] = (uint64_t)(start + length);
        start += length + 1;
    }
    return count;
}

/* Writes the level above `count` nodes: keccak(min, max) of pairs; a last one moves up. */
EXPORT void muster_lines_parents(const uint8_t *level, int64_t count, uint8_t *above) {
    uint8_t pair[2 * HASH];
    for (int64_t i = 0; i + 1 < count; i += 2) {
        const uint8_t *left = level + HASH * i, *right = left + HASH;
        int swapped = memcmp(left, right, HASH) > 0;
        memcpy(pair, swapped ? right : left, HASH);
        memcpy(pair + HASH, swapped ? left : right, HASH);
        muster_keccak256(pair, sizeof pair, above + HASH * (i / 2));
    }
    if (count & 1)
        memcpy(above + HASH * (count / 2), level + HASH * (count - 1), HASH);
}
