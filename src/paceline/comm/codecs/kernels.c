/* Coding of float32 values in one pass over memory. What these functions write is, byte for byte, what the
 * PyTorch operations in paceline/comm/codecs write: every value is made by the same IEEE operations in the
 * same order, so the compiler may neither fuse nor reorder them (-ffp-contract=off, no -ffast-math).
 * Nothing is allocated, and nothing is kept between calls. Little-endian processors only. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define STRETCH 65536 /* codec.py: codes are packed stretch by stretch */
#define BLOCK 256     /* scaled.py */
#define SIGN_BLOCK 1024
#define LANES 64 /* NUM_LANES in int8_int4_int2.py */
#define INFINITE 0x7f800000u
#define BUCKETS 2048
#define GROUP 64

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }

/* What is not a number counts as infinite. */
static inline uint32_t size_of(float x) {
  uint32_t size = magnitude(x);
  return size > INFINITE ? INFINITE : size;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* halves.py: the largest magnitude; what is not a number is above all, and is written as one. */
void paceline_top(const float *x, int64_t n, float *top) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t size = magnitude(x[i]);
    found = size > found ? size : found;
  }
  *top = float_of(found > INFINITE ? 0x7fc00000u : found);
}

/* halves.py: the upper halves, rounded to even; `odd` is not 0 where one of them is not finite. */
void paceline_bf16_encode(const float *x, int64_t n, uint16_t *out, int32_t *odd) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i]);
    uint32_t half = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    found |= (bits & INFINITE) == INFINITE || (half & 0x7f80u) == 0x7f80u;
    out[i] = (uint16_t)half;
  }
  *odd = (int32_t)found;
}

/* halves.py: values / scale, a power of two, as half floats, rounded to even. Source of the three cases: Giesen
 * 2012, float_to_half_fast3_rtne. */
void paceline_fp16_encode(const float *x, int64_t n, float scale, uint16_t *out) {
  float factor = 1.0f / scale;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = bits_of(x[i] * factor), sign = bits & 0x80000000u, size = bits ^ sign;
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000u; /* below 2**-14: whole steps of 2**-24 */
    uint32_t usual = (size + 0xc8000fffu + ((size >> 13) & 1)) >> 13;
    uint32_t odd = size > INFINITE ? 0x7e00u : 0x7c00u;
    uint32_t half = size < 0x38800000u ? small : usual;
    half = size >= 0x47800000u ? odd : half;
    out[i] = (uint16_t)(half | (sign >> 16));
  }
}

/* philox_uniform: 256 numbers in [0, 1) for one block of a row, of four words of each of 64 counters. Words lie in 64
 * bits, whose upper halves may have anything, so that products need no shuffles. */
static void draw(uint64_t key, uint32_t row, uint32_t block, float *noise) {
  for (uint32_t lane = 0; lane < LANES; lane++) {
    uint64_t a = (uint32_t)(block * LANES + lane), b = row, c = 0, d = 0;
    uint32_t k = (uint32_t)key, l = (uint32_t)(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      uint64_t first = (uint32_t)a * (uint64_t)0xD2511F53u, second = (uint32_t)c * (uint64_t)0xCD9E8D57u;
      a = (second >> 32) ^ b ^ k;
      b = second;
      c = (first >> 32) ^ d ^ l;
      d = first;
      k += 0x9E3779B9u;
      l += 0xBB67AE85u;
    }
    noise[lane] = (float)(int32_t)((uint32_t)a >> 8) * 0x1p-24f;
    noise[LANES + lane] = (float)(int32_t)((uint32_t)b >> 8) * 0x1p-24f;
    noise[2 * LANES + lane] = (float)(int32_t)((uint32_t)c >> 8) * 0x1p-24f;
    noise[3 * LANES + lane] = (float)(int32_t)((uint32_t)d >> 8) * 0x1p-24f;
  }
}

/* What the random numbers of a stretch are a function of; its first block. */
typedef struct {
  uint64_t key;
  uint32_t row, block;
} random_t;

/* Codes of up to one stretch, and a scale for every block; to the nearest where `random` is null. */
static void quantise(const float *x, int64_t n, float most, int8_t *codes, float *scales,
                     const random_t *random) {
  for (int64_t start = 0; start < n; start += BLOCK) {
    const float *block = x + start;
    int64_t length = smaller(BLOCK, n - start);
    uint32_t top = 0; /* as integers magnitudes have the order of floats, and NaN is above all */
    for (int64_t i = 0; i < length; i++) {
      uint32_t size = magnitude(block[i]);
      top = size > top ? size : top;
    }
    float scale = float_of(top) / most;
    if (scale < 0x1p-126f) scale = 0x1p-126f; /* a NaN stays */
    scales[start / BLOCK] = scale;
    if (random != 0) {
      float noise[BLOCK];
      draw(random->key, random->row, random->block + (uint32_t)(start / BLOCK), noise);
      for (int64_t i = 0; i < length; i++) {
        float step = floorf(block[i] / scale + noise[i]);
        step = step > most ? most : step;
        codes[start + i] = (int8_t)(int32_t)(step == step ? step : 0.0f);
      }
      continue;
    }
    for (int64_t i = 0; i < length; i++) {
      float step = rintf(block[i] / scale);
      codes[start + i] = (int8_t)(int32_t)(step == step ? step : 0.0f);
    }
  }
}

static void scaled_encode(const float *x, int64_t n, int32_t bits, uint8_t *out, float *scales,
                          random_t *random) {
  int8_t codes[STRETCH];
  float most = (float)((1 << (bits - 1)) - 1);
  uint8_t mask = (uint8_t)((1 << bits) - 1);
  int64_t per_byte = 8 / bits;
  for (int64_t begin = 0; begin < n; begin += STRETCH) {
    int64_t length = smaller(STRETCH, n - begin), width = (length * bits + 7) / 8;
    uint8_t *packed = out + begin * bits / 8;
    if (random != 0) random->block = (uint32_t)(begin / BLOCK);
    if (bits == 8) {
      quantise(x + begin, length, most, (int8_t *)packed, scales + begin / BLOCK, random);
      continue;
    }
    quantise(x + begin, length, most, codes, scales + begin / BLOCK, random);
    for (int64_t i = 0; i < width; i++) packed[i] = (uint8_t)codes[i] & mask;
    for (int64_t run = 1; run < per_byte; run++) {
      const int8_t *above = codes + run * width;
      int64_t rest = smaller(width, length - run * width);
      int shift = (int)(bits * run);
      for (int64_t i = 0; i < rest; i++) packed[i] |= (uint8_t)(((uint8_t)above[i] & mask) << shift);
    }
  }
}

/* scaled.py: a payload of packed codes; scales [ceil(n / 256)]. */
void paceline_scaled_encode(const float *x, int64_t n, int32_t bits, uint8_t *out, float *scales) {
  scaled_encode(x, n, bits, out, scales, 0);
}

/* The same, up with a probability that is the fraction, else down. */
void paceline_scaled_draw(const float *x, int64_t n, int32_t bits, uint8_t *out, float *scales, uint64_t key,
                          uint32_t row) {
  random_t random = {key, row, 0};
  scaled_encode(x, n, bits, out, scales, &random);
}

static void scale_codes(const int8_t *codes, int64_t n, const float *scales, int64_t block, float *out) {
  for (int64_t start = 0; start < n; start += block) {
    int64_t end = smaller(start + block, n);
    float scale = scales[start / block];
    for (int64_t i = start; i < end; i++) out[i] = (float)codes[i] * scale;
  }
}

void paceline_scaled_decode(const uint8_t *payload, int64_t n, int32_t bits, const float *scales, float *out) {
  int8_t codes[STRETCH];
  uint8_t mask = (uint8_t)((1 << bits) - 1), sign = (uint8_t)(1 << (bits - 1));
  int64_t per_byte = 8 / bits;
  for (int64_t begin = 0; begin < n; begin += STRETCH) {
    int64_t length = smaller(STRETCH, n - begin), width = (length * bits + 7) / 8;
    const uint8_t *packed = payload + begin * bits / 8;
    if (bits == 8) {
      scale_codes((const int8_t *)packed, length, scales + begin / BLOCK, BLOCK, out + begin);
      continue;
    }
    for (int64_t run = 0; run < per_byte; run++) {
      int8_t *into = codes + run * width;
      int64_t rest = smaller(width, length - run * width);
      int shift = (int)(bits * run);
      for (int64_t i = 0; i < rest; i++)
        into[i] = (int8_t)(uint8_t)((((packed[i] >> shift) & mask) ^ sign) - sign);
    }
    scale_codes(codes, length, scales + begin / BLOCK, BLOCK, out + begin);
  }
}

/* The widths of the planes of a code, low bits first (packing.py). */
static int planes_of(int bits, int *planes) {
  int found = 0;
  for (int plane = 8; plane >= 1; plane /= 2)
    for (; bits >= plane; bits -= plane) planes[found++] = plane;
  return found;
}

/* fixed_step.py: steps of `top` / 2^(bits - 2), counted from -`top`, as planes of packed codes. */
void paceline_fixed_encode(const float *x, int64_t n, int32_t bits, float top, uint8_t *out) {
  uint16_t codes[STRETCH];
  int planes[16], num_planes = planes_of(bits, planes);
  float most = (float)(1 << (bits - 2));
  for (int64_t begin = 0; begin < n; begin += STRETCH) {
    int64_t length = smaller(STRETCH, n - begin);
    uint8_t *packed = out + begin / 8 * bits;
    for (int64_t i = 0; i < length; i++) {
      float step = rintf(x[begin + i] / top * most) + most;
      codes[i] = (uint16_t)(int32_t)(magnitude(step) < INFINITE ? step : 0.0f);
    }
    for (int plane = 0, shift = 0; plane < num_planes; shift += planes[plane++]) {
      int own = planes[plane];
      int64_t width = (length * own + 7) / 8;
      uint16_t mask = (uint16_t)((1 << own) - 1);
      for (int64_t run = 0; run < 8 / own; run++) {
        const uint16_t *above = codes + run * width;
        int64_t rest = smaller(width, length - run * width);
        int up = (int)run * own;
        if (run == 0)
          for (int64_t i = 0; i < rest; i++) packed[i] = (uint8_t)((above[i] >> shift) & mask);
        else
          for (int64_t i = 0; i < rest; i++) packed[i] |= (uint8_t)(((above[i] >> shift) & mask) << up);
      }
      packed += width;
    }
  }
}

void paceline_fixed_decode(const uint8_t *payload, int64_t n, int32_t bits, float top, float *out) {
  uint16_t codes[STRETCH];
  int planes[16], num_planes = planes_of(bits, planes);
  float most = (float)(1 << (bits - 2));
  for (int64_t begin = 0; begin < n; begin += STRETCH) {
    int64_t length = smaller(STRETCH, n - begin);
    const uint8_t *packed = payload + begin / 8 * bits;
    memset(codes, 0, (size_t)length * sizeof(codes[0]));
    for (int plane = 0, shift = 0; plane < num_planes; shift += planes[plane++]) {
      int own = planes[plane];
      int64_t width = (length * own + 7) / 8;
      uint16_t mask = (uint16_t)((1 << own) - 1);
      for (int64_t run = 0; run < 8 / own; run++) {
        uint16_t *into = codes + run * width;
        int64_t rest = smaller(width, length - run * width);
        int down = (int)run * own;
        for (int64_t i = 0; i < rest; i++) into[i] |= (uint16_t)(((packed[i] >> down) & mask) << shift);
      }
      packed += width;
    }
    for (int64_t i = 0; i < length; i++) out[begin + i] = ((float)codes[i] - most) / most * top;
  }
}

/* The sum of the magnitudes of a block: halves are added to each other until one value is left. */
static float sum_of_sizes(const float *x, int64_t length) {
  float part[SIGN_BLOCK / 2];
  for (int64_t i = 0; i < SIGN_BLOCK / 2; i++) {
    float low = i < length ? fabsf(x[i]) : 0.0f;
    float high = i + SIGN_BLOCK / 2 < length ? fabsf(x[i + SIGN_BLOCK / 2]) : 0.0f;
    part[i] = low + high;
  }
  for (int64_t half = SIGN_BLOCK / 4; half >= 1; half /= 2)
    for (int64_t i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
}

/* sign.py: bits, and the sum of the magnitudes of every block of 1,024. */
void paceline_sign_encode(const float *x, int64_t n, uint8_t *out, float *sums) {
  for (int64_t begin = 0; begin < n; begin += STRETCH) {
    int64_t length = smaller(STRETCH, n - begin), width = (length + 7) / 8;
    uint8_t *packed = out + begin / 8;
    for (int64_t start = begin; start < begin + length; start += SIGN_BLOCK) {
      if (n - start >= SIGN_BLOCK)
        sums[start / SIGN_BLOCK] = sum_of_sizes(x + start, SIGN_BLOCK); /* a constant: no tests inside */
      else
        sums[start / SIGN_BLOCK] = sum_of_sizes(x + start, n - start);
    }
    memset(packed, 0, (size_t)width);
    for (int64_t run = 0; run < 8; run++) {
      const float *part = x + begin + run * width;
      int64_t rest = smaller(width, length - run * width);
      for (int64_t i = 0; i < rest; i++) packed[i] |= (uint8_t)((part[i] >= 0.0f) << run);
    }
  }
}

void paceline_sign_decode(const uint8_t *payload, int64_t n, const float *scales, float *out) {
  int8_t codes[STRETCH];
  for (int64_t begin = 0; begin < n; begin += STRETCH) {
    int64_t length = smaller(STRETCH, n - begin), width = (length + 7) / 8;
    const uint8_t *packed = payload + begin / 8;
    for (int64_t run = 0; run < 8; run++) {
      int64_t rest = smaller(width, length - run * width);
      for (int64_t i = 0; i < rest; i++)
        codes[run * width + i] = (int8_t)(2 * ((packed[i] >> run) & 1) - 1);
    }
    scale_codes(codes, length, scales + begin / SIGN_BLOCK, SIGN_BLOCK, out + begin);
  }
}

/* The kept-th largest of some sizes, and how many of those equal to it are kept; by 11, 11 and 9 bits. */
static uint32_t limit_of(const float *x, int64_t n, int64_t kept, int64_t *num_equal) {
  static const int shifts[3] = {20, 9, 0};
  static const uint32_t widths[3] = {2048, 2048, 512};
  uint32_t prefix = 0;
  int64_t wanted = kept;
  for (int round = 0; round < 3; round++) {
    int64_t counts[BUCKETS] = {0};
    int shift = shifts[round];
    uint32_t above = round ? (uint32_t)shifts[round - 1] : 32;
    for (int64_t i = 0; i < n; i++) {
      uint32_t size = size_of(x[i]);
      if (round == 0 || (size >> above) == (prefix >> above)) counts[(size >> shift) % widths[round]]++;
    }
    uint32_t bucket = widths[round] - 1;
    while (counts[bucket] < wanted) wanted -= counts[bucket--];
    prefix |= bucket << shift;
  }
  *num_equal = wanted;
  return prefix;
}

/* sparse.py: places of the `kept` largest magnitudes, ascending; among equals the first.
 * A sample gives a size that a few more reach than are wanted; these go to `values` and `places`, which hold
 * `room`, and only they are looked at further. If that fails, all are. */
void paceline_largest(const float *x, int64_t n, int64_t kept, int64_t *places, float *values, int64_t room,
                      const float *sample, int64_t num_samples, int64_t wanted) {
  if (kept == 0) return;
  int64_t found = 0, equal, num_equal;
  if (num_samples > 0) {
    uint32_t least = limit_of(sample, num_samples, wanted, &num_equal);
    int64_t i = 0;
    for (; i + GROUP <= n && found + GROUP <= room; i += GROUP) {
      uint8_t reach[GROUP]; /* what is not a number reaches any size */
      for (int k = 0; k < GROUP; k++) reach[k] = magnitude(x[i + k]) >= least;
      for (int part = 0; part < GROUP; part += 8) {
        uint64_t eight;
        memcpy(&eight, reach + part, 8);
        for (; eight != 0; eight &= eight - 1) {
          int64_t place = i + part + __builtin_ctzll(eight) / 8;
          values[found] = x[place];
          places[found++] = place;
        }
      }
    }
    for (; i < n && found < room; i++) {
      values[found] = x[i];
      places[found] = i;
      found += size_of(x[i]) >= least;
    }
    if (i < n || least == 0) found = 0; /* too many, or zeros among them */
  }
  if (found >= kept) {
    uint32_t limit = limit_of(values, found, kept, &num_equal);
    int64_t out = 0;
    equal = 0;
    for (int64_t i = 0; i < found; i++) {
      uint32_t size = size_of(values[i]);
      int takes = size > limit || (size == limit && equal < num_equal);
      equal += size == limit;
      places[out] = places[i];
      out += takes;
    }
    return;
  }
  uint32_t limit = limit_of(x, n, kept, &num_equal);
  int64_t out = 0;
  equal = 0;
  for (int64_t i = 0; i < n && out < kept; i++) {
    uint32_t size = size_of(x[i]);
    int takes = size > limit || (size == limit && equal < num_equal);
    equal += size == limit;
    places[out] = i;
    out += takes;
  }
}
