/* See siphash.h. The names are those of the paper. */
#include "siphash.h"

struct state {
  uint64_t v0, v1, v2, v3;
};

static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static uint64_t load(const uint8_t *bytes, size_t count) {
  uint64_t word = 0;
  for (size_t i = 0; i < count; i++) word |= (uint64_t)bytes[i] << 8 * i;
  return word;
}

static void store(uint64_t word, uint8_t *bytes) {
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(word >> 8 * i);
}

static void rounds(struct state *s, int count) {
  while (count--) {
    s->v0 += s->v1;
    s->v2 += s->v3;
    s->v1 = rotate(s->v1, 13) ^ s->v0;
    s->v3 = rotate(s->v3, 16) ^ s->v2;
    s->v0 = rotate(s->v0, 32);
    s->v2 += s->v1;
    s->v0 += s->v3;
    s->v1 = rotate(s->v1, 17) ^ s->v2;
    s->v3 = rotate(s->v3, 21) ^ s->v0;
    s->v2 = rotate(s->v2, 32);
  }
}

static void compress(struct state *s, uint64_t word) {
  s->v3 ^= word;
  rounds(s, 2);
  s->v0 ^= word;
}

void siphash(const uint8_t key[SIPHASH_BYTES], const void *bytes, size_t length, uint8_t hash[SIPHASH_BYTES]) {
  uint64_t k0 = load(key, 8), k1 = load(key + 8, 8);
  struct state s = {
      .v0 = k0 ^ UINT64_C(0x736f6d6570736575),
      .v1 = k1 ^ UINT64_C(0x646f72616e646f6d) ^ 0xee,
      .v2 = k0 ^ UINT64_C(0x6c7967656e657261),
      .v3 = k1 ^ UINT64_C(0x7465646279746573),
  };
  const uint8_t *at = bytes;
  size_t left = length;
  for (; left >= 8; at += 8, left -= 8) compress(&s, load(at, 8));
  compress(&s, load(at, left) | (uint64_t)length << 56);
  s.v2 ^= 0xee;
  rounds(&s, 4);
  store(s.v0 ^ s.v1 ^ s.v2 ^ s.v3, hash);
  s.v1 ^= 0xdd;
  rounds(&s, 4);
  store(s.v0 ^ s.v1 ^ s.v2 ^ s.v3, hash + 8);
}
