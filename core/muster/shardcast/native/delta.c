/* The block codec of muster.shardcast.delta_block, byte for byte, several times as fast.
 *
 * Format and method are described there and in docs/protocol.md section 10. Deltas come from
 * strangers: whatever `in` holds, the decoder reads and writes within the arrays it was given and
 * ends after one pass over them. Little-endian machines only; the loader checks.
 */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define CLASSES 256
#define COMPLEMENT 0x80
#define MAX_SHIFT 31
#define MAX_ROW 24 /* bytes: five numbers of at most 4 and four of 1 */

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST ""
#endif
/* Digest of the sources that this was compiled from, which the loader checks. */
EXPORT const char muster_delta_source[65] = SOURCE_DIGEST;

#include "merge.h"

enum { FITS_NOT = -1, OK = 0, CUT_OFF = 1, BAD_TABLE = 2, OUTSIDE = 3, TOO_LONG = 4 };

INLINE uint32_t get(const void *floats, int64_t i, int width) {
    uint32_t wide = 0;
    uint16_t narrow;
    if (width == 4) {
        memcpy(&wide, (const uint8_t *)floats + 4 * i, 4);
        return wide;
    }
    memcpy(&narrow, (const uint8_t *)floats + 2 * i, 2);
    return narrow;
}

INLINE void put(void *floats, int64_t i, uint32_t value, int width) {
    uint16_t narrow = (uint16_t)value;
    if (width == 4)
        memcpy((uint8_t *)floats + 4 * i, &value, 4);
    else
        memcpy((uint8_t *)floats + 2 * i, &narrow, 2);
}

INLINE uint32_t class_of(uint32_t pattern, int width, int mantissa) {
    return (pattern >> mantissa) & ((1u << (8 * width - 1 - mantissa)) - 1);
}

/* The pattern's number in the order of the floats, modulo 2^(8 width); its own inverse. */
INLINE uint32_t ordered(uint32_t pattern, int width) {
    uint32_t sign = 1u << (8 * width - 1);
    return pattern & sign ? pattern ^ (sign - 1) : pattern;
}

/* Writing */

typedef struct {
    uint8_t *at;
    uint64_t word;
    int bits;
} Writer;

INLINE void write_bits(Writer *w, uint64_t value, int count) { /* count <= 32 */
    w->word |= value << w->bits;
    w->bits += count;
    if (w->bits >= 32) {
        uint32_t low = (uint32_t)w->word;
        memcpy(w->at, &low, 4);
        w->at += 4;
        w->word >>= 32;
        w->bits -= 32;
    }
}

INLINE void write_unary(Writer *w, uint64_t zeros) {
    for (; zeros >= 32; zeros -= 32) write_bits(w, 0, 32);
    write_bits(w, (uint64_t)1 << zeros, (int)zeros + 1);
}

INLINE void finish(Writer *w) {
    for (; w->bits > 0; w->bits -= 8, w->word >>= 8) *w->at++ = (uint8_t)w->word;
}

static uint8_t *write_varint(uint8_t *at, uint64_t value) {
    for (; value > 0x7F; value >>= 7) *at++ = (uint8_t)(value | 0x80);
    *at++ = (uint8_t)value;
    return at;
}

/* Encoding */

typedef struct {
    const uint32_t *values;
    uint32_t count;
    int shift;
    int complement;
    uint64_t quotients; /* their sum */
} List;

typedef struct {
    int exponent;
    uint32_t changes;
    uint32_t large;
    const int32_t *steps;
    List lists[3]; /* gaps, gaps between large changes, sizes of large changes less two */
} Class;

static uint64_t sum_shifted(const uint32_t *values, uint32_t count, int shift) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++) sum += values[i] >> shift;
    return sum;
}

/* Choose the Rice parameter with the fewest bits, of the three around the mean's bit length. */
static void choose_shift(List *list) {
    list->shift = 0;
    list->quotients = 0;
    if (!list->count) return;
    uint64_t mean = sum_shifted(list->values, list->count, 0) / list->count;
    int guess = 0;
    while (mean >> guess && guess < MAX_SHIFT) guess++;
    uint64_t least = UINT64_MAX;
    for (int shift = guess > 2 ? guess - 2 : 0; shift <= guess; shift++) {
        uint64_t sum = sum_shifted(list->values, list->count, shift);
        uint64_t cost = sum + (uint64_t)shift * list->count;
        if (cost < least) {
            least = cost;
            list->shift = shift;
            list->quotients = sum;
        }
    }
}

/* Write the gaps between positions, or those between the other positions if these are fewer. */
static uint32_t *gaps(List *list, const uint32_t *positions, uint32_t count, uint32_t members,
                      uint32_t *values) {
    uint32_t expected = 0, last = 0;
    list->values = values;
    list->complement = 2 * (uint64_t)count > members;
    if (list->complement) {
        for (uint32_t i = 0; i <= count; i++) {
            uint32_t upto = i < count ? positions[i] : members;
            for (; expected < upto; expected++) {
                *values++ = expected - last;
                last = expected + 1;
            }
            expected = upto + 1;
        }
    } else {
        for (uint32_t i = 0; i < count; i++) {
            *values++ = positions[i] - last;
            last = positions[i] + 1;
        }
    }
    list->count = (uint32_t)(values - list->values);
    return values;
}

/* Build a class's lists at `values`; `ranks` are overwritten. Returns the end of the lists. */
static uint32_t *build_lists(Class *class, uint32_t *ranks, uint32_t members, uint32_t *values) {
    values = gaps(&class->lists[0], ranks, class->changes, members, values);
    uint32_t large = 0;
    for (uint32_t i = 0; i < class->changes; i++) {
        int32_t step = class->steps[i];
        ranks[large] = i;
        large += step > 1 || step < -1;
    }
    class->large = large;
    values = gaps(&class->lists[1], ranks, large, class->changes, values);
    List *sizes = &class->lists[2];
    sizes->values = values;
    sizes->count = large;
    sizes->complement = 0;
    for (uint32_t i = 0; i < large; i++) {
        int64_t step = class->steps[ranks[i]];
        *values++ = (uint32_t)((step < 0 ? -step : step) - 2);
    }
    for (int i = 0; i < 3; i++) choose_shift(&class->lists[i]);
    return values;
}

static uint8_t *write_row(uint8_t *at, const Class *class) {
    const List *lists = class->lists;
    *at++ = (uint8_t)class->exponent;
    *at++ = (uint8_t)(lists[0].shift | (lists[0].complement ? COMPLEMENT : 0));
    at = write_varint(at, class->changes);
    if (lists[0].complement) at = write_varint(at, lists[0].count);
    *at++ = (uint8_t)(lists[1].shift | (lists[1].complement ? COMPLEMENT : 0));
    at = write_varint(at, class->large);
    *at++ = (uint8_t)lists[2].shift;
    return at;
}

/* List every change in order as (class and rank, step), count members and changes per class. */
INLINE uint32_t scan(const void *base, const void *fresh, int64_t n, int width, int mantissa,
                     uint32_t *places, int32_t *steps, uint32_t *members, uint32_t *changes) {
    uint32_t found = 0;
    int spare = 32 - 8 * width;
    for (int64_t i = 0; i < n; i++) {
        uint32_t old = get(base, i, width), new = get(fresh, i, width);
        uint32_t class = class_of(old, width, mantissa);
        uint32_t rank = members[class]++;
        if (old != new) {
            uint32_t step = ordered(new, width) - ordered(old, width);
            places[found] = class << 24 | rank;
            steps[found] = (int32_t)(step << spare) >> spare;
            changes[class]++;
            found++;
        }
    }
    return found;
}

INLINE void write_signs(Writer *w, const int32_t *steps, uint32_t count) {
    for (uint32_t i = 0; i < count; i += 32) {
        uint32_t word = 0, here = count - i < 32 ? count - i : 32;
        for (uint32_t j = 0; j < here; j++) word |= (uint32_t)(steps[i + j] < 0) << j;
        write_bits(w, word, (int)here);
    }
}

INLINE int64_t encode(const void *base, const void *fresh, int64_t n, int width, int mantissa,
                      uint8_t *out, int64_t room, uint32_t *scratch) {
    static const Class none;
    uint32_t members[CLASSES] = {0}, changes[CLASSES] = {0}, next[CLASSES];
    Class classes[CLASSES];
    uint8_t table[CLASSES * MAX_ROW + 4], *at = table;
    uint32_t *places = scratch, *ranks = scratch + 2 * n, *values = scratch;
    int32_t *found_steps = (int32_t *)(scratch + n), *steps = (int32_t *)(scratch + 3 * n);
    uint32_t found = scan(base, fresh, n, width, mantissa, places, found_steps, members, changes);
    if (!found) return 0;
    int count = 0;
    for (uint32_t class = 0, start = 0; class < CLASSES; start += changes[class++]) {
        next[class] = start;
        count += changes[class] != 0;
    }
    for (uint32_t i = 0; i < found; i++) {
        uint32_t slot = next[places[i] >> 24]++;
        ranks[slot] = places[i] & 0xFFFFFF;
        steps[slot] = found_steps[i];
    }
    /* Fewer than half of a class are listed, so the lists fit where the unsorted changes were. */
    uint64_t unary_bits = 0, fixed_bits = found;
    at = write_varint(at, (uint64_t)count);
    for (int exponent = 0, i = 0; exponent < CLASSES; exponent++) {
        if (!changes[exponent]) continue;
        Class *class = &classes[i++];
        uint32_t start = next[exponent] - changes[exponent];
        *class = none;
        class->exponent = exponent;
        class->changes = changes[exponent];
        class->steps = steps + start;
        values = build_lists(class, ranks + start, members[exponent], values);
        at = write_row(at, class);
        for (int j = 0; j < 3; j++) {
            const List *list = &class->lists[j];
            unary_bits += list->quotients + list->count;
            fixed_bits += (uint64_t)list->count * (uint64_t)list->shift;
        }
    }
    uint64_t unary_bytes = (unary_bits + 7) / 8, fixed_bytes = (fixed_bits + 7) / 8;
    at = write_varint(at, unary_bytes);
    uint64_t head = (uint64_t)(at - table), size = head + unary_bytes + fixed_bytes;
    if (size > (uint64_t)room) return FITS_NOT;
    memcpy(out, table, head);
    Writer unary = {out + head, 0, 0}, fixed = {out + head + unary_bytes, 0, 0};
    for (int i = 0; i < count; i++) {
        const Class *class = &classes[i];
        for (int j = 0; j < 3; j++) {
            const List *list = &class->lists[j];
            uint64_t mask = ((uint64_t)1 << list->shift) - 1;
            for (uint32_t k = 0; k < list->count; k++) {
                write_unary(&unary, list->values[k] >> list->shift);
                write_bits(&fixed, list->values[k] & mask, list->shift);
            }
        }
        write_signs(&fixed, class->steps, class->changes);
    }
    finish(&unary);
    finish(&fixed);
    return (int64_t)size;
}

/* Reading */

typedef struct {
    const uint8_t *at, *end;
    uint64_t word;
    int bits; /* that `word` still holds */
} Reader;

/* Load up to eight bytes; 0 when none are left. The word must be used up. */
INLINE int refill(Reader *r) {
    int64_t left = r->end - r->at;
    int count = left < 8 ? (int)left : 8;
    r->word = 0;
    if (count == 8)
        memcpy(&r->word, r->at, 8);
    else
        for (int i = 0; i < count; i++) r->word |= (uint64_t)r->at[i] << 8 * i;
    r->at += count;
    r->bits = 8 * count;
    return count;
}

/* Number of zero bits before the next one bit, which is read too; -1 at the end. */
INLINE int64_t read_unary(Reader *r) {
    int64_t zeros = 0;
    while (!r->word) {
        zeros += r->bits;
        if (!refill(r)) return -1;
    }
    int here = __builtin_ctzll(r->word);
    r->word = r->word >> here >> 1;
    r->bits -= here + 1;
    return zeros + here;
}

INLINE int64_t read_bits(Reader *r, int count) { /* count <= 32; -1 at the end */
    uint64_t value = r->word;
    int have = r->bits;
    if (have >= count) {
        r->word = value >> count;
        r->bits -= count;
    } else {
        if (!refill(r)) return -1;
        int rest = count - have;
        if (r->bits < rest) return -1;
        value |= r->word << have;
        r->word >>= rest;
        r->bits -= rest;
    }
    return (int64_t)(value & (((uint64_t)1 << count) - 1));
}

static int read_varint(const uint8_t **at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    for (int i = 0; i < 9 && *at < end; i++) {
        uint8_t byte = *(*at)++;
        *value |= (uint64_t)(byte & 0x7F) << 7 * i;
        if (byte < 0x80) return OK;
    }
    return CUT_OFF;
}

/* Decoding */

typedef struct {
    int exponent;
    int complement, shift;
    int large_complement, large_shift;
    int size_shift;
    uint64_t changes, listed, large;
} Row;

typedef struct {
    uint32_t *gap, *gaps_end;
    const uint32_t *step, *steps_end;
    int complement;
} Cursor;

static int read_row(const uint8_t **at, const uint8_t *end, Row *row) {
    if (end - *at < 2) return CUT_OFF;
    row->exponent = *(*at)++;
    row->complement = **at & COMPLEMENT;
    row->shift = *(*at)++ & 0x7F;
    if (read_varint(at, end, &row->changes)) return CUT_OFF;
    row->listed = row->changes;
    if (row->complement && read_varint(at, end, &row->listed)) return CUT_OFF;
    if (end - *at < 1) return CUT_OFF;
    row->large_complement = **at & COMPLEMENT;
    row->large_shift = *(*at)++ & 0x7F;
    if (read_varint(at, end, &row->large)) return CUT_OFF;
    if (end - *at < 1) return CUT_OFF;
    row->size_shift = *(*at)++;
    if (row->shift > MAX_SHIFT || row->large_shift > MAX_SHIFT || row->size_shift > MAX_SHIFT)
        return BAD_TABLE;
    if (!row->changes || row->listed > row->changes || row->large > row->changes) return BAD_TABLE;
    return OK;
}

INLINE int read_rice(Reader *unary, Reader *fixed, int shift, uint64_t *value) {
    int64_t quotient = read_unary(unary), rest = read_bits(fixed, shift);
    if (quotient < 0 || rest < 0) return CUT_OFF;
    *value = (uint64_t)quotient << shift | (uint64_t)rest;
    return OK;
}

/* Read gaps whose positions must stay below `members`; each is stored with its step past the last. */
static int read_gaps(Reader *unary, Reader *fixed, uint64_t count, int shift, uint64_t members,
                     uint32_t *gaps) {
    uint64_t value, position = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (read_rice(unary, fixed, shift, &value)) return CUT_OFF;
        if (value >= members || (position += value + 1) > members) return OUTSIDE;
        gaps[i] = (uint32_t)value + 1;
    }
    return OK;
}

/* Read the steps of a class's changes; `gaps` is a buffer for a temporary list. */
static int read_steps(const Row *row, Reader *unary, Reader *fixed, uint32_t *gaps,
                      uint32_t *steps) {
    uint64_t value, listed = row->large_complement ? row->changes - row->large : row->large;
    uint32_t usual = row->large_complement ? 2 : 1, other = 3 - usual;
    int fault = read_gaps(unary, fixed, listed, row->large_shift, row->changes, gaps);
    if (fault) return fault;
    for (uint64_t i = 0; i < row->changes; i++) steps[i] = usual;
    for (uint64_t i = 0, next = 0; i < listed; i++) steps[(next += gaps[i]) - 1] = other;
    for (uint64_t i = 0; i < row->changes; i++) {
        if (steps[i] == 1) continue;
        if (read_rice(unary, fixed, row->size_shift, &value)) return CUT_OFF;
        steps[i] = (uint32_t)value + 2;
    }
    for (uint64_t i = 0; i < row->changes; i += 32) {
        uint64_t here = row->changes - i < 32 ? row->changes - i : 32;
        int64_t signs = read_bits(fixed, (int)here);
        if (signs < 0) return CUT_OFF;
        for (uint64_t j = 0; j < here; j++)
            steps[i + j] = signs >> j & 1 ? -steps[i + j] : steps[i + j];
    }
    return OK;
}

/* Handle a listed float of a class, or any float of a class that lists its unchanged floats. */
INLINE int meet(Cursor *cursor, uint32_t *left, uint32_t *value, int width) {
    int is_listed = 1;
    if (cursor->complement) {
        /* `left` is 1 for every float of the class; the gap counts down here. */
        is_listed = cursor->gap < cursor->gaps_end && --*cursor->gap == 0;
        cursor->gap += is_listed;
        *left = 1;
        if (is_listed) return OK;
    } else {
        *left = cursor->gap < cursor->gaps_end ? *cursor->gap++ : UINT32_MAX;
    }
    if (cursor->step == cursor->steps_end) return OUTSIDE;
    uint32_t mask = width == 4 ? UINT32_MAX : 0xFFFF;
    *value = ordered((ordered(*value, width) + *cursor->step++) & mask, width);
    return OK;
}

INLINE int apply(const void *base, void *out, int64_t n, int width, int mantissa, Cursor *cursors,
                 uint32_t *left) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t value = get(base, i, width);
        uint32_t class = class_of(value, width, mantissa);
        if (__builtin_expect(--left[class] == 0, 0) &&
            meet(&cursors[class], &left[class], &value, width))
            return OUTSIDE;
        put(out, i, value, width);
    }
    return OK;
}

INLINE int decode(const void *base, int64_t n, int width, int mantissa, const uint8_t *in,
                  int64_t length, void *out, uint32_t *scratch) {
    const uint8_t *at = in, *end = in + length;
    Row rows[CLASSES];
    Cursor cursors[CLASSES];
    uint32_t left[CLASSES];
    uint64_t count, total = 0, unary_bytes;
    int fault;
    if (read_varint(&at, end, &count)) return CUT_OFF;
    if (count > CLASSES) return BAD_TABLE;
    for (uint64_t i = 0; i < count; i++) {
        if ((fault = read_row(&at, end, &rows[i]))) return fault;
        if (i && rows[i].exponent <= rows[i - 1].exponent) return BAD_TABLE;
        if (rows[i].changes > (uint64_t)n - total) return BAD_TABLE;
        total += rows[i].changes;
    }
    if (read_varint(&at, end, &unary_bytes)) return CUT_OFF;
    if (unary_bytes > (uint64_t)(end - at)) return CUT_OFF;
    Reader unary = {at, at + unary_bytes, 0, 0}, fixed = {at + unary_bytes, end, 0, 0};
    uint32_t *gaps = scratch, *steps = scratch + n;
    for (int i = 0; i < CLASSES; i++) left[i] = UINT32_MAX;
    for (uint64_t i = 0; i < count; i++) {
        const Row *row = &rows[i];
        Cursor *cursor = &cursors[row->exponent];
        fault = read_gaps(&unary, &fixed, row->listed, row->shift, (uint64_t)n, gaps);
        if (fault) return fault;
        *cursor = (Cursor){gaps, gaps + row->listed, steps, steps + row->changes, row->complement};
        fault = read_steps(row, &unary, &fixed, scratch + 2 * n, steps);
        if (fault) return fault;
        left[row->exponent] = row->complement ? 1 : *cursor->gap++;
        gaps += row->listed;
        steps += row->changes;
    }
    if (read_unary(&unary) >= 0) return TOO_LONG;
    if (8 * (fixed.end - fixed.at) + fixed.bits > 7) return TOO_LONG;
    if ((fault = apply(base, out, n, width, mantissa, cursors, left))) return fault;
    for (uint64_t i = 0; i < count; i++) {
        const Cursor *cursor = &cursors[rows[i].exponent];
        if (cursor->step != cursor->steps_end || cursor->gap != cursor->gaps_end) return OUTSIDE;
    }
    return OK;
}

/* What Python calls. Encoding returns the bytes written, 0 when nothing changed, -1 when they exceed
 * `room`; decoding a fault, 0 for none. `scratch` holds 4 n numbers for encoding, 3 n for decoding; n <= 2^20. */

EXPORT int64_t muster_delta_encode(const void *base, const void *fresh, int64_t n, int32_t width,
                            int32_t mantissa, uint8_t *out, int64_t room, uint32_t *scratch) {
    if (width == 2 && mantissa == 7) return encode(base, fresh, n, 2, 7, out, room, scratch);
    if (width == 2) return encode(base, fresh, n, 2, 10, out, room, scratch);
    return encode(base, fresh, n, 4, 23, out, room, scratch);
}

EXPORT int32_t muster_delta_decode(const void *base, int64_t n, int32_t width, int32_t mantissa,
                            const uint8_t *in, int64_t length, void *out, uint32_t *scratch) {
    if (width == 2 && mantissa == 7) return decode(base, n, 2, 7, in, length, out, scratch);
    if (width == 2) return decode(base, n, 2, 10, in, length, out, scratch);
    return decode(base, n, 4, 23, in, length, out, scratch);
}
