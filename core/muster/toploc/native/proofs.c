/* TOPLOC proofs in C: builds them, and measures the distance of hidden states from them.
 *
 * For speed only. portable.py and field.py are the reference: they run where this was not compiled,
 * and the bytes and figures here must equal theirs.
 */

#include "field.h"
#include "portable.h"
#include "selection.h"

#define NO_MATCH 18446744073709551616.0

/* As in wire.py. */
enum { MODULUS_SLACK = 1024, MOST_POINTS_WITH_SLACK = 512 };

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST "unknown"
#endif

/* The sources this was compiled from, so that a stale library is noticed. */
EXPORT const char muster_toploc_source[] = SOURCE_DIGEST;

typedef struct {
    Selection selection;
    Field field;
    void *memory;
} Scratch;

/* ---- one chunk ---- */

INLINE void put_word(uint8_t *bytes, uint32_t word) {
    bytes[0] = (uint8_t)(word >> 8);
    bytes[1] = (uint8_t)word;
}

INLINE uint32_t get_word(const uint8_t *bytes) { return (uint32_t)bytes[0] << 8 | bytes[1]; }

INLINE void place_points(Scratch *s, size_t k, uint32_t modulus) {
    Field *f = &s->field;
    for (size_t i = 0; i < k; i++) {
        f->x[i] = s->selection.index[i] % modulus;
        f->y[i] = s->selection.value[i];
    }
    for (size_t i = k; i < whole_steps(k); i++)
        f->x[i] = 0;
}

/* Writes the proof of the k entries that were taken. */
WIDEST_VECTORS
static int build_taken(Scratch *s, size_t elements, size_t k, uint8_t *proof) {
    uint32_t modulus = find_modulus(&s->selection, elements, k);
    if (!modulus)
        return NO_MODULUS;
    place_points(s, k, modulus);
    interpolate(&s->field, k);
    put_word(proof, modulus);
    for (size_t j = 0; j < k; j++)
        put_word(proof + 2 + 2 * j, residue(s->field.coefficient[j]));
    return OK;
}

WIDEST_VECTORS
static int build_chunk(Scratch *s, const uint16_t *patterns, size_t elements, size_t k,
                       uint8_t *proof) {
    int status = take_top(&s->selection, patterns, elements, k);
    return status == OK ? build_taken(s, elements, k, proof) : status;
}

INLINE uint32_t least_modulus(size_t elements, size_t k) {
    if (elements <= PRIME)
        return PRIME;
    return k <= MOST_POINTS_WITH_SLACK ? PRIME - MODULUS_SLACK : (uint32_t)k;
}

INLINE int read_proof(Scratch *s, const uint8_t *proof, size_t elements, size_t k) {
    uint32_t modulus = get_word(proof);
    if (modulus > PRIME || modulus < least_modulus(elements, k))
        return BAD_MODULUS;
    for (size_t j = 0; j < whole_steps(k); j++) {
        uint32_t word = j < k ? get_word(proof + 2 + 2 * j) : 0;
        if (word >= PRIME)
            return BAD_COEFFICIENT;
        s->field.coefficient[j] = word;
    }
    return OK;
}

INLINE double median_of(const uint32_t *histogram, uint32_t count) {
    uint32_t below = 0;
    int low = -1, value = 0;
    for (;; value++) {
        below += histogram[value];
        if (low < 0 && below > (count - 1) / 2)
            low = value;
        if (below > count / 2)
            return (low + value) / 2.0;
    }
}

/* Entries compared, as in wire.py: the larger half where a proof covers more. */
INLINE size_t compared_of(size_t elements, size_t k) {
    size_t half = elements / 2 ? elements / 2 : 1;
    return k < half ? k : half;
}

/* Which is the smallest of every four entries of the pool: none of the largest. */
INLINE uint64_t find_decoy(const uint16_t *pool, uint64_t number) {
    uint64_t least = 4 * number;
    for (uint64_t i = least + 1; i < 4 * number + 4; i++)
        if ((pool[i] & MAGNITUDE) < (pool[least] & MAGNITUDE))
            least = i;
    return least;
}

INLINE uint16_t largest_of(const uint16_t *values, size_t count) {
    uint16_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t own = values[i] & MAGNITUDE;
        largest = own > largest ? own : largest;
    }
    return largest;
}

/* Decoys at which the proof claims an entry that is larger than theirs and no larger than any. */
INLINE uint32_t match_decoys(Scratch *s, size_t elements, size_t k, uint32_t modulus) {
    if (elements < 2 * k || elements < DECOY_POOL)
        return 0;
    Field *f = &s->field;
    const uint16_t *pool = s->selection.pool;
    uint16_t own[DECOYS], largest = largest_of(s->selection.value, compared_of(elements, k));
    for (size_t d = 0; d < DECOYS; d++) {
        uint64_t place = find_decoy(pool, d);
        own[d] = pool[place] & MAGNITUDE;
        f->x[d] = pool_place(elements, place) % modulus;
    }
    list_powers(f->x, DECOYS, f->power);
    evaluate(f->coefficient, whole_steps(k), f->power, DECOYS, f->y);
    uint32_t matches = 0;
    for (size_t d = 0; d < DECOYS; d++) {
        uint32_t claim = residue(f->y[d]) & MAGNITUDE;
        matches += claim > own[d] && claim <= largest;
    }
    return matches;
}

/* Figures: exponent mismatches, mean and median mantissa error, sign mismatches. */
INLINE void compare(const uint16_t *values, size_t k, const double *claimed, double *figures) {
    uint32_t histogram[MANTISSA + 1] = {0}, matches = 0, signs = 0, total = 0;
    for (size_t i = 0; i < k; i++) {
        uint32_t actual = values[i], claim = residue(claimed[i]);
        uint32_t is_match = ((claim ^ actual) & EXPONENT) == 0;
        int difference = (int)(claim & MANTISSA) - (int)(actual & MANTISSA);
        uint32_t error = (uint32_t)(difference < 0 ? -difference : difference);
        histogram[error] += is_match;
        matches += is_match;
        total += error * is_match;
        signs += ((claim ^ actual) >> SIGN_SHIFT) & is_match;
    }
    figures[0] = (double)(k - matches);
    figures[1] = matches ? (double)total / matches : NO_MATCH;
    figures[2] = matches ? median_of(histogram, matches) : NO_MATCH;
    figures[3] = (double)signs;
}

/* Compares the entries that were taken with the proof that was read. */
WIDEST_VECTORS
static void compare_taken(Scratch *s, size_t elements, size_t k, uint32_t modulus,
                          double *figures) {
    Field *f = &s->field;
    size_t seen = compared_of(elements, k);
    place_points(s, seen, modulus);
    list_powers(f->x, whole_steps(seen), f->power);
    evaluate(f->coefficient, whole_steps(k), f->power, whole_steps(seen), f->y);
    compare(s->selection.value, seen, f->y, figures);
    figures[4] = match_decoys(s, elements, k, modulus);
}

WIDEST_VECTORS
static int verify_chunk(Scratch *s, const uint16_t *patterns, size_t elements, size_t k,
                        const uint8_t *proof, double *figures) {
    int status = read_proof(s, proof, elements, k);
    if (status == OK)
        status = take_top(&s->selection, patterns, elements, compared_of(elements, k));
    if (status == OK)
        compare_taken(s, elements, k, get_word(proof), figures);
    return status;
}

/* ---- memory ---- */

/* Returns the next piece of the memory at base; base NULL only adds up what is needed. */
static void *carve(char *base, size_t *used, size_t count, size_t size) {
    void *piece = base ? base + *used : NULL;
    *used += (count * size + 63) / 64 * 64;
    return piece;
}

static size_t lay_out(Scratch *s, char *base, size_t lanes, size_t k) {
    Selection *c = &s->selection;
    Field *f = &s->field;
    size_t count = whole_steps(k) < DECOYS ? DECOYS : whole_steps(k);
    size_t used = 0;
    c->is_taken = carve(base, &used, PRIME, sizeof *c->is_taken);
    c->index = carve(base, &used, k, sizeof *c->index);
    c->value = carve(base, &used, k, sizeof *c->value);
    c->pool = carve(base, &used, DECOY_POOL, sizeof *c->pool);
    c->maxima = carve(base, &used, lanes, sizeof *c->maxima);
    /* One more: listing writes one ahead. */
    c->hit = carve(base, &used, lanes + 1, sizeof *c->hit);
    c->candidate = carve(base, &used, candidate_room(k), sizeof *c->candidate);
    c->place = carve(base, &used, candidate_room(k), sizeof *c->place);
    c->tie = carve(base, &used, candidate_room(k), sizeof *c->tie);
    f->x = carve(base, &used, count, sizeof *f->x);
    f->y = carve(base, &used, count, sizeof *f->y);
    f->weight = carve(base, &used, count, sizeof *f->weight);
    f->sums = carve(base, &used, count, sizeof *f->sums);
    f->coefficient = carve(base, &used, count, sizeof *f->coefficient);
    f->product = carve(base, &used, roots_room(count), sizeof *f->product);
    f->spare = carve(base, &used, roots_room(count), sizeof *f->spare);
    f->power = carve(base, &used, (STEP + 1) * count, sizeof *f->power);
    f->row = carve(base, &used, (STEP + 1) * count, sizeof *f->row);
    return used;
}

static size_t points_of(size_t elements, size_t topk) { return topk < elements ? topk : elements; }

/* Makes room for chunks of so many lanes and points; false when there is no memory. */
static int open_scratch(Scratch *s, size_t lanes, size_t k) {
    s->memory = malloc(lay_out(s, NULL, lanes, k) + 64);
    if (!s->memory)
        return 0;
    char *base = (char *)s->memory + (64 - (uintptr_t)s->memory % 64);
    lay_out(s, base, lanes, k);
    memset(s->selection.is_taken, 0, PRIME);
    return 1;
}

/* Makes room for the largest of some chunks. */
static int open_for(Scratch *s, const size_t *sizes, size_t count, size_t topk) {
    size_t most = 0;
    for (size_t i = 0; i < count; i++)
        most = sizes[i] > most ? sizes[i] : most;
    return open_scratch(s, lane_count(most), points_of(most, topk));
}

/* ---- many chunks ---- */

/* Writes the chunks' proofs one after the other, 2 + 2 * min(topk, size) bytes each.
 *
 * chunks[i] points to sizes[i] bfloat16 patterns, at least 1 and below 2^32. Returns OK, NOT_FINITE,
 * NO_MEMORY or NO_MODULUS; what was written is of no use unless OK. */
EXPORT int muster_toploc_build(const uint16_t *const *chunks, const size_t *sizes, size_t count,
                               size_t topk, uint8_t *proofs) {
    Scratch scratch;
    if (!open_for(&scratch, sizes, count, topk))
        return NO_MEMORY;
    int status = OK;
    for (size_t i = 0; i < count && status == OK; i++) {
        size_t k = points_of(sizes[i], topk);
        status = build_chunk(&scratch, chunks[i], sizes[i], k, proofs);
        proofs += 2 + 2 * k;
    }
    free(scratch.memory);
    return status;
}

/* Writes five figures per chunk, those of compare() and matched decoys, for proofs laid out as above.
 *
 * Returns OK, NOT_FINITE, NO_MEMORY, BAD_MODULUS or BAD_COEFFICIENT. */
EXPORT int muster_toploc_verify(const uint16_t *const *chunks, const size_t *sizes, size_t count,
                                size_t topk, const uint8_t *proofs, double *figures) {
    Scratch scratch;
    if (!open_for(&scratch, sizes, count, topk))
        return NO_MEMORY;
    int status = OK;
    for (size_t i = 0; i < count && status == OK; i++, figures += 5) {
        size_t k = points_of(sizes[i], topk);
        status = verify_chunk(&scratch, chunks[i], sizes[i], k, proofs, figures);
        proofs += 2 + 2 * k;
    }
    free(scratch.memory);
    return status;
}

/* The same for chunks of one size whose entries were chosen elsewhere, for example on a GPU;
 * take_chosen() reads one row per chunk. */
EXPORT int muster_toploc_build_chosen(const int32_t *rows, size_t count, size_t elements, size_t k,
                                      uint8_t *proofs) {
    Scratch scratch;
    if (!open_scratch(&scratch, 0, k))
        return NO_MEMORY;
    int status = OK;
    for (size_t i = 0; i < count && status == OK; i++, rows += 2 * k + DECOY_POOL + 1) {
        status = take_chosen(&scratch.selection, rows, k);
        if (status == OK)
            status = build_taken(&scratch, elements, k, proofs);
        proofs += 2 + 2 * k;
    }
    free(scratch.memory);
    return status;
}

/* The rows have the entries that are compared with proofs of k points: compared_of(). */
EXPORT int muster_toploc_verify_chosen(const int32_t *rows, size_t count, size_t elements, size_t k,
                                       const uint8_t *proofs, double *figures) {
    Scratch scratch;
    if (!open_scratch(&scratch, 0, k))
        return NO_MEMORY;
    int status = OK;
    size_t seen = compared_of(elements, k);
    for (size_t i = 0; i < count && status == OK; i++, figures += 5) {
        status = read_proof(&scratch, proofs, elements, k);
        if (status == OK)
            status = take_chosen(&scratch.selection, rows, seen);
        if (status == OK)
            compare_taken(&scratch, elements, k, get_word(proofs), figures);
        rows += 2 * seen + DECOY_POOL + 1;
        proofs += 2 + 2 * k;
    }
    free(scratch.memory);
    return status;
}
