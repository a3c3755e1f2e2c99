/* The k largest magnitudes of a chunk, and a modulus that keeps their indices apart.
 *
 * A chunk is read as tiles of ROWS x LANES entries. The k-th largest of the maxima of all tiles'
 * lanes is a floor under the k-th largest entry, so one vertical pass over the chunk leaves a few
 * hundred candidates; bisection over the 15 bits of a magnitude finds the cut among them. No branch
 * there depends on a value: values are as good as random, and mispredictions cost more than work.
 */

#ifndef MUSTER_TOPLOC_SELECTION_H
#define MUSTER_TOPLOC_SELECTION_H

#include "portable.h"

enum { ROWS = 32, LANES = 16, TILE = ROWS * LANES, STREAMS = 4 };

/* As in chunks.py. */
enum { DECOYS = 32, DECOY_POOL = 4 * DECOYS };

typedef struct {
    uint32_t *index;     /* [k] the chosen entries, in no particular order */
    uint16_t *value;     /* [k] their patterns */
    uint16_t *pool;      /* [DECOY_POOL] patterns that decoys are chosen from */
    uint16_t *maxima;    /* [lane_count] largest magnitude per lane */
    uint32_t *hit;       /* [lane_count] lanes that hold candidates */
    uint16_t *candidate; /* [candidate_room] magnitudes not below the floor */
    uint32_t *place;     /* [candidate_room] where they are */
    uint32_t *tie;       /* [candidate_room] places of candidates at the cut */
    uint8_t *is_taken;   /* [PRIME] one per residue, all zero between uses */
} Selection;

static size_t lane_count(size_t elements) { return (elements + TILE - 1) / TILE * LANES; }

/* With more candidates, values are so similar that a search of the whole chunk costs no more. */
static size_t candidate_limit(size_t k) { return 8 * k + 1024; }

/* Lanes are listed whole, and one entry is written ahead. */
static size_t candidate_room(size_t k) { return candidate_limit(k) + ROWS + 1; }

INLINE int16_t magnitude_of(uint16_t pattern) { return (int16_t)(pattern & MAGNITUDE); }

INLINE size_t count_at_least(const uint16_t *patterns, size_t count, int16_t cut) {
    size_t total = 0;
    /* Runs short enough for 16-bit counters, which fill a vector twice as well. */
    for (size_t start = 0; start < count; start += 16384) {
        size_t end = count - start < 16384 ? count : start + 16384;
        int16_t found = 0;
        for (size_t i = start; i < end; i++)
            found = (int16_t)(found + (magnitude_of(patterns[i]) >= cut));
        total += (size_t)found;
    }
    return total;
}

INLINE int16_t kth_largest(const uint16_t *patterns, size_t count, size_t k) {
    int cut = 0;
    for (int bit = 1 << 14; bit; bit >>= 1)
        if (count_at_least(patterns, count, (int16_t)(cut | bit)) >= k)
            cut |= bit;
    return (int16_t)cut;
}

INLINE void tile_maxima(const uint16_t *tile, uint16_t *maxima) {
    int16_t best[LANES] = {0};
    for (size_t row = 0; row < ROWS; row++)
        for (size_t lane = 0; lane < LANES; lane++) {
            int16_t magnitude = magnitude_of(tile[row * LANES + lane]);
            best[lane] = magnitude > best[lane] ? magnitude : best[lane];
        }
    for (size_t lane = 0; lane < LANES; lane++)
        maxima[lane] = (uint16_t)best[lane];
}

INLINE void lane_maxima(const uint16_t *patterns, size_t elements, uint16_t *maxima) {
    size_t whole = elements / TILE, part = whole / STREAMS;
    /* Parts are read side by side: the chunk comes from memory, and one stream would wait more. */
    for (size_t i = 0; i < whole; i++) {
        size_t tile = i < part * STREAMS ? i % STREAMS * part + i / STREAMS : i;
        tile_maxima(patterns + tile * TILE, maxima + tile * LANES);
    }
    if (whole * TILE == elements)
        return;
    uint16_t filled_up[TILE] = {0};
    memcpy(filled_up, patterns + whole * TILE, (elements - whole * TILE) * sizeof *filled_up);
    tile_maxima(filled_up, maxima + whole * LANES);
}

/* Lists the entries not below the floor; returns how many, or more than the limit. */
INLINE size_t list_candidates(Selection *s, const uint16_t *patterns, size_t elements,
                              int16_t floor, size_t limit) {
    size_t hits = 0, found = 0, lanes = lane_count(elements);
    for (size_t lane = 0; lane < lanes; lane++) {
        s->hit[hits] = (uint32_t)lane;
        hits += (int16_t)s->maxima[lane] >= floor;
    }
    for (size_t h = 0; h < hits && found <= limit; h++) {
        size_t start = s->hit[h] / LANES * TILE;
        size_t end = elements < start + TILE ? elements : start + TILE;
        for (size_t i = start + s->hit[h] % LANES; i < end; i += LANES) {
            s->candidate[found] = patterns[i] & MAGNITUDE;
            s->place[found] = (uint32_t)i;
            found += magnitude_of(patterns[i]) >= floor;
        }
    }
    return found;
}

static int compare_places(const void *first, const void *second) {
    uint32_t a = *(const uint32_t *)first, b = *(const uint32_t *)second;
    return (a > b) - (a < b);
}

/* Chooses among the candidates: all above the cut, then the first ones at the cut. */
INLINE void choose_candidates(Selection *s, size_t count, size_t k) {
    int16_t cut = kth_largest(s->candidate, count, k);
    size_t chosen = 0, ties = 0;
    for (size_t i = 0; i < count; i++) {
        /* At most k - 1 are above, so this writes nowhere else. */
        s->index[chosen] = s->place[i];
        chosen += (int16_t)s->candidate[i] > cut;
        s->tie[ties] = s->place[i];
        ties += (int16_t)s->candidate[i] == cut;
    }
    if (ties > k - chosen)
        qsort(s->tie, ties, sizeof *s->tie, compare_places);
    memcpy(s->index + chosen, s->tie, (k - chosen) * sizeof *s->tie);
}

/* The same over the whole chunk: for small ones, and for those with too many equal values. */
INLINE void choose_entries(Selection *s, const uint16_t *patterns, size_t elements, size_t k) {
    int16_t cut = kth_largest(patterns, elements, k);
    size_t above = cut == MAGNITUDE ? 0 : count_at_least(patterns, elements, (int16_t)(cut + 1));
    size_t ties = k - above, chosen = 0;
    for (size_t i = 0; chosen < k; i++) {
        int16_t magnitude = magnitude_of(patterns[i]);
        s->index[chosen] = (uint32_t)i;
        size_t is_tie = magnitude == cut && ties;
        ties -= is_tie;
        chosen += is_tie | (magnitude > cut);
    }
}

INLINE void select_top(Selection *s, const uint16_t *patterns, size_t elements, size_t k) {
    size_t limit = candidate_limit(k), found = limit + 1;
    /* With hardly more lanes than k, the floor would let nearly everything through. */
    if (elements / ROWS >= k + k / 4) {
        lane_maxima(patterns, elements, s->maxima);
        int16_t floor = kth_largest(s->maxima, lane_count(elements), k);
        found = list_candidates(s, patterns, elements, floor, limit);
    }
    if (found <= limit)
        choose_candidates(s, found, k);
    else
        choose_entries(s, patterns, elements, k);
}

INLINE uint32_t pool_place(size_t elements, uint64_t number) {
    return (uint32_t)(number * (elements - 1) / (DECOY_POOL - 1));
}

/* Chooses k entries; refuses NaN and infinity, which are the largest magnitudes there are. */
INLINE int take_top(Selection *s, const uint16_t *patterns, size_t elements, size_t k) {
    select_top(s, patterns, elements, k);
    for (size_t i = 0; i < k; i++) {
        s->value[i] = patterns[s->index[i]];
        if ((s->value[i] & EXPONENT) == EXPONENT)
            return NOT_FINITE;
    }
    for (uint64_t i = 0; i < DECOY_POOL; i++)
        s->pool[i] = patterns[pool_place(elements, i)];
    return OK;
}

/* Takes k entries that were chosen elsewhere: their places, their patterns, those of the pool, and
 * whether all entries are numbers. */
INLINE int take_chosen(Selection *s, const int32_t *row, size_t k) {
    for (size_t i = 0; i < k; i++) {
        s->index[i] = (uint32_t)row[i];
        s->value[i] = (uint16_t)row[k + i];
    }
    for (size_t i = 0; i < DECOY_POOL; i++)
        s->pool[i] = (uint16_t)row[2 * k + i];
    return row[2 * k + DECOY_POOL] ? OK : NOT_FINITE;
}

INLINE int is_distinct(Selection *s, size_t k, uint32_t modulus) {
    size_t marked = 0;
    int distinct = 1;
    for (; marked < k && distinct; marked++) {
        uint8_t *taken = s->is_taken + s->index[marked] % modulus;
        distinct = !*taken;
        *taken = 1;
    }
    for (size_t i = 0; i < marked; i++)
        s->is_taken[s->index[i] % modulus] = 0;
    return distinct;
}

/* The largest modulus up to the prime that keeps the chosen indices apart; 0 for none. */
INLINE uint32_t find_modulus(Selection *s, size_t elements, size_t k) {
    if (elements <= PRIME)
        return PRIME;
    for (uint32_t modulus = PRIME; modulus >= k; modulus--)
        if (is_distinct(s, k, modulus))
            return modulus;
    return 0;
}

#endif
