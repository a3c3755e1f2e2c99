/* Finds the tokens of a row that can have its highest score under the noise of
 * muster.inference.sampling.
 *
 * Noise grows with its hash, so a token with a small hash cannot win: few tokens need logarithms,
 * and the tokens that no bound excludes are returned with their hashes. Python computes their
 * scores, so that no last bit of a logarithm here decides a choice. Every bound is loosened by more
 * than rounding can change. Logits come from strangers' weights: whatever they are, this code reads
 * only `vocab` logits of a row, and returns no token if it cannot decide.
 */

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "floats have excess precision here, so scaled logits would not be numpy's"
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__) && __GNUC__ >= 12 && !defined(WIDEST_VECTORS)
/* One copy per instruction set, chosen when the library is loaded. */
#define WIDEST_VECTORS \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif !defined(WIDEST_VECTORS)
#define WIDEST_VECTORS
#endif

#if defined(__GNUC__)
/* Inlined always, so that every copy above gets vectors of its own width. */
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#else
#define INLINE static inline
#define EXPORT __declspec(dllexport)
#endif

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST ""
#endif
/* Digest of the sources that this was compiled from, which the loader checks. */
EXPORT const char muster_choices_source[65] = SOURCE_DIGEST;

/* A row is cut into tiles of ROWS x LANES tokens. MOST is the same as in sampling.py. */
enum { LANES = 32, ROWS = 32, TILE = LANES * ROWS, MOST = 8 };
/* A float's pattern. */
enum { INFINITE = 0x7F800000 };

#define FIRST_FACTOR 0x7FEB352Du
#define SECOND_FACTOR 0x846CA68Bu
#define LN2 0.6931471805599453

typedef struct {
    const uint32_t *logits; /* patterns of floats */
    float temperature;
    size_t vocab;
    uint32_t k0, k1;
} Row;

/* The result for a row, in the layout of sampling.py. If there are fewer than MOST tokens, the
 * first one fills the other places. */
typedef struct {
    int64_t id[MOST]; /* in no order */
    uint32_t hash[MOST];
    float scaled[MOST]; /* logit / T */
    int64_t found;      /* number of tokens; 0 if the row has to be computed whole */
} Found;

typedef struct {
    double best;  /* of the scores seen so far */
    double floor; /* scores below lose to it, however both are rounded */
    int count;    /* more than MOST: too many to tell apart */
    double score[MOST];
    Found *kept;
} Candidates;

INLINE float number_of(uint32_t pattern) {
    float number;
    memcpy(&number, &pattern, sizeof number);
    return number;
}

INLINE uint32_t pattern_of(float number) {
    uint32_t pattern;
    memcpy(&pattern, &number, sizeof pattern);
    return pattern;
}

/* ---- hashes ---- */

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= FIRST_FACTOR;
    x ^= x >> 15;
    x *= SECOND_FACTOR;
    return x ^ x >> 16;
}

INLINE void set_keys(Row *row, uint64_t seed, uint64_t position) {
    uint32_t high = (uint32_t)(seed >> 32), low = (uint32_t)seed, place = (uint32_t)position;
    uint32_t first = mix(mix(low) ^ high), second = mix(mix(high ^ 0x9E3779B9u) ^ low);
    row->k0 = mix(first ^ place);
    row->k1 = mix(second + place * 0x85EBCA6Bu);
}

/* Computes a tile's hashes but for the last step, `x ^ x >> 16`, which leaves their order in the
 * high half, and the largest of every lane. Ids of a tile differ in their low bits only: the first
 * step changes all by one constant, and the first product is the sum of a row's and a lane's. */
INLINE void hash_tile(const Row *row, uint32_t first, size_t rows, uint32_t *word,
                      uint32_t *largest) {
    uint32_t turn = row->k0 ^ (first ^ row->k0) >> 16, k1 = row->k1;
    uint32_t lane_product[LANES], row_product[ROWS], most[LANES] = {0};
    for (uint32_t lane = 0; lane < LANES; lane++)
        lane_product[lane] = (lane ^ (turn & (LANES - 1))) * FIRST_FACTOR;
    for (uint32_t r = 0; r < ROWS; r++)
        row_product[r] = ((first + r * LANES) ^ (turn & ~(uint32_t)(LANES - 1))) * FIRST_FACTOR;
    for (size_t r = 0; r < rows; r++)
        for (size_t lane = 0; lane < LANES; lane++) {
            uint32_t x = row_product[r] + lane_product[lane];
            x ^= x >> 15;
            x *= SECOND_FACTOR;
            x ^= x >> 16;
            x += k1;
            x ^= x >> 16;
            x *= FIRST_FACTOR;
            x ^= x >> 15;
            x *= SECOND_FACTOR;
            word[r * LANES + lane] = x;
            most[lane] = x > most[lane] ? x : most[lane];
        }
    memcpy(largest, most, sizeof most);
}

/* ---- bounds ---- */

/* With w = 1 - u, the noise -ln(-ln(u)) is at most -ln(w); so that of a hash is at most
 * (32 - log2(2^32 - h - 0.5)) ln 2, and log2(2^e (1 + f)) is at least e + f. */
INLINE double most_noise(uint32_t hash) {
    float left = (float)~hash + 0.5f;
    uint32_t bits = pattern_of(left);
    return (32 + 127 - (double)bits * 0x1p-23) * LN2 + 1e-5;
}

/* Returns a word that no hash word can be below whose noise reaches `noise`: w is at most
 * exp(-noise), and 2^(f - e) is at most 2^-e (1 + f). */
INLINE uint32_t least_word(double noise) {
    if (!(noise > 0))
        return 0;
    if (noise > 23)
        return UINT32_MAX; /* no noise is above 22.88 */
    double power = 32 - noise / LN2, whole = floor(power);
    double left = ldexp(1 + (power - whole), (int)whole) + 2;
    return left >= 0x1p32 ? 0 : (uint32_t)(0x1p32 - left) & 0xFFFF0000u;
}

/* ---- candidates ---- */

INLINE void keep(Candidates *c, int at, int64_t id, uint32_t hash, float scaled, double score) {
    c->kept->id[at] = id;
    c->kept->hash[at] = hash;
    c->kept->scaled[at] = scaled;
    c->score[at] = score;
}

INLINE void drop_losers(Candidates *c) {
    const Found *k = c->kept;
    int left = 0;
    for (int i = 0; i < c->count; i++)
        if (c->score[i] >= c->floor)
            keep(c, left++, k->id[i], k->hash[i], k->scaled[i], c->score[i]);
    c->count = left;
}

INLINE void consider(Candidates *c, const Row *row, size_t id, uint32_t word) {
    uint32_t hash = word ^ word >> 16;
    float scaled = number_of(row->logits[id]) / row->temperature;
    if (scaled + most_noise(hash) < c->floor || c->count > MOST)
        return;
    double score = scaled - log(-log((hash + 0.5) * 0x1p-32));
    if (score < c->floor)
        return;
    if (score > c->best) {
        c->best = score;
        /* Noise and score are rounded to float32: by 1e-6, and by 2^-24 of the score, each. */
        c->floor = score - 4e-6 - fabs(score) * 0x1p-21;
    }
    if (c->count == MOST)
        drop_losers(c);
    if (c->count < MOST)
        keep(c, c->count, (int64_t)id, hash, scaled, score);
    c->count++;
}

INLINE void search_tile(Candidates *c, const Row *row, size_t tile, float largest_logit) {
    uint32_t word[TILE], largest[LANES];
    size_t first = tile * TILE, left = row->vocab - first;
    size_t size = left < TILE ? left : TILE;
    uint32_t least = least_word(c->floor - (double)(largest_logit / row->temperature));
    if (least == UINT32_MAX)
        return;
    hash_tile(row, (uint32_t)first, (size + LANES - 1) / LANES, word, largest);
    for (size_t lane = 0; lane < LANES; lane++)
        if (largest[lane] >= least)
            for (size_t i = lane; i < size; i += LANES)
                if (word[i] >= least)
                    consider(c, row, first + i, word[i]);
}

/* ---- rows ---- */

/* Returns the largest logit of a whole tile, NaN if there is one. Compares patterns as integers:
 * with the magnitude of negative ones turned round, their order is that of the numbers. */
INLINE float largest_of(const uint32_t *logits) {
    int32_t most[LANES], magnitude[LANES] = {0}, top = INT32_MIN, size = 0;
    for (size_t lane = 0; lane < LANES; lane++)
        most[lane] = INT32_MIN;
    for (size_t r = 0; r < ROWS; r++)
        for (size_t lane = 0; lane < LANES; lane++) {
            int32_t pattern = (int32_t)logits[r * LANES + lane];
            int32_t place = pattern ^ (pattern >> 31 & INT32_MAX), bare = pattern & INT32_MAX;
            most[lane] = place > most[lane] ? place : most[lane];
            magnitude[lane] = bare > magnitude[lane] ? bare : magnitude[lane];
        }
    for (size_t lane = 0; lane < LANES; lane++) {
        top = most[lane] > top ? most[lane] : top;
        size = magnitude[lane] > size ? magnitude[lane] : size;
    }
    return size > INFINITE ? NAN : number_of((uint32_t)(top ^ (top >> 31 & INT32_MAX)));
}

INLINE float largest_of_part(const uint32_t *logits, size_t size) {
    uint32_t filled_up[TILE];
    for (size_t i = 0; i < TILE; i++)
        filled_up[i] = i < size ? logits[i] : 0x80000000u | INFINITE;
    return largest_of(filled_up);
}

/* Lists a row's candidates; none if it cannot decide. */
WIDEST_VECTORS
static void search_row(Candidates *c, const Row *row, float *largest) {
    size_t tiles = (row->vocab + TILE - 1) / TILE, top = 0;
    for (size_t tile = 0; tile < tiles; tile++) {
        size_t first = tile * TILE, left = row->vocab - first;
        const uint32_t *logits = row->logits + first;
        largest[tile] = left < TILE ? largest_of_part(logits, left) : largest_of(logits);
        if (isnan(largest[tile]))
            return;
        top = largest[tile] > largest[top] ? tile : top;
    }
    if (!(row->temperature > 0) || !isfinite(row->temperature) ||
        !isfinite(largest[top] / row->temperature))
        return;
    search_tile(c, row, top, largest[top]);
    for (size_t tile = 0; tile < tiles; tile++)
        if (tile != top)
            search_tile(c, row, tile, largest[tile]);
    if (c->count <= MOST)
        drop_losers(c);
}

/* Finds the candidates of rows of `vocab` logits that follow each other; `largest` has a place per
 * tile. */
EXPORT void muster_choices_find(const uint32_t *logits, size_t rows, size_t vocab,
                                const uint64_t *seeds, const uint64_t *positions,
                                const float *temperatures, float *largest, Found *found) {
    for (size_t r = 0; r < rows; r++) {
        Candidates c = {.best = -INFINITY, .floor = -INFINITY, .kept = found + r};
        Row row = {.logits = logits + r * vocab, .temperature = temperatures[r], .vocab = vocab};
        set_keys(&row, seeds[r], positions[r]);
        search_row(&c, &row, largest);
        const Found *k = c.kept;
        found[r].found = c.count > MOST ? 0 : c.count;
        for (int i = (int)found[r].found; i && i < MOST; i++)
            keep(&c, i, k->id[0], k->hash[0], k->scaled[0], c.score[0]);
    }
}
