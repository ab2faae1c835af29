/* How peers of other hosts prove that they know the key: the hash, and the greeting that it protects. */
#include "../providers/soft/tcp.h"
#include "../providers/soft/tcp_handshake.h"
#include "check.h"

/* The authors' vectors: key 00 01 ... 0f, message 00 01 ... of n bytes. As OpenSSL computes them, too. */
static const struct {
  size_t length;
  const char *hash;
} vectors[] = {
    {0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
    {2, "8177228da4a45dc7fca38bdef60affe4"},  {3, "9c70b60c5267a94e5f33b6b02985ed51"},
    {4, "f88164c12d9c8faf7d0f6e7c7bcd5579"},  {5, "1368875980776f8854527a07690e9627"},
    {6, "14eeca338b208613485ea0308fd7a15e"},  {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
    {8, "3b62a9ba6258f5610f83e264f31497b4"},  {9, "264499060ad9baabc47f8b02bb6d71ed"},
    {15, "5493e99933b0a8117e08ec0f97cfc3d9"}, {16, "6ee2a4ca67b054bbfd3315bf85230577"},
    {17, "473d06e8738db89854c066c47ae47740"}, {63, "5150d1772f50834a503e069a973fbd7c"},
};

static void test_vectors(void) {
  uint8_t key[SIPHASH_BYTES], message[64], hash[SIPHASH_BYTES];
  char text[2 * SIPHASH_BYTES + 1];
  for (uint8_t i = 0; i < 64; i++) message[i] = i;
  memcpy(key, message, sizeof key);
  for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
    siphash(key, message, vectors[i].length, hash);
    for (int b = 0; b < SIPHASH_BYTES; b++) snprintf(text + 2 * b, 3, "%02x", hash[b]);
    CHECK(strcmp(text, vectors[i].hash) == 0, "%zu bytes: %s", vectors[i].length, text);
  }
}

static const uint8_t key[SIPHASH_BYTES] = "sixteen letters";
static const struct tcp_greeting hello = {.port = 7, .profile = SOFT_RXE, .to_qp = 64, .from_qp = 65, .psn = 9};

static void test_greeting(void) {
  uint8_t challenge[TCP_NONCE_BYTES], answer[SIPHASH_BYTES], own_answer[SIPHASH_BYTES];
  struct tcp_greeting greeting = hello;
  CHECK(tcp_random(challenge));
  CHECK(tcp_greet(&greeting, key, challenge));
  CHECK(tcp_check_greeting(&greeting, key, challenge));
  tcp_proof(&greeting, key, challenge, answer);
  tcp_proof(&greeting, key, challenge, own_answer);
  CHECK(tcp_same_proof(answer, own_answer));
  CHECK(!tcp_same_proof(answer, greeting.proof), "a peer's proof is no answer to it");
}

/* Every bit of what is announced, of the nonces and of the key counts. */
static void test_one_bit(void) {
  uint8_t challenge[TCP_NONCE_BYTES], other_key[SIPHASH_BYTES];
  struct tcp_greeting greeting = hello;
  CHECK(tcp_random(challenge));
  CHECK(tcp_greet(&greeting, key, challenge));
  for (size_t bit = 0; bit < 8 * sizeof greeting; bit++) {
    struct tcp_greeting changed = greeting;
    ((uint8_t *)&changed)[bit / 8] ^= (uint8_t)(1 << bit % 8);
    CHECK(!tcp_check_greeting(&changed, key, challenge), "bit %zu", bit);
  }
  for (size_t bit = 0; bit < 8 * TCP_NONCE_BYTES; bit++) {
    challenge[bit / 8] ^= (uint8_t)(1 << bit % 8);
    CHECK(!tcp_check_greeting(&greeting, key, challenge), "bit %zu of the challenge", bit);
    challenge[bit / 8] ^= (uint8_t)(1 << bit % 8);
    memcpy(other_key, key, sizeof key);
    other_key[bit / 8] ^= (uint8_t)(1 << bit % 8);
    CHECK(!tcp_check_greeting(&greeting, other_key, challenge), "bit %zu of the key", bit);
  }
  CHECK(tcp_check_greeting(&greeting, key, challenge));
}

/* A proof by the right key over a greeting of another version is not enough. */
static void test_other_version(void) {
  uint8_t challenge[TCP_NONCE_BYTES] = {0};
  struct tcp_greeting greeting = hello;
  CHECK(tcp_greet(&greeting, key, challenge));
  greeting.magic[7]++;
  uint8_t text[1 + TCP_NONCE_BYTES + offsetof(struct tcp_greeting, proof)] = {'g'};
  memcpy(text + 1 + TCP_NONCE_BYTES, &greeting, offsetof(struct tcp_greeting, proof));
  siphash(key, text, sizeof text, greeting.proof);
  CHECK(!tcp_check_greeting(&greeting, key, challenge));
  greeting.magic[7]--;
  text[1 + TCP_NONCE_BYTES + 7]--;
  siphash(key, text, sizeof text, greeting.proof);
  CHECK(tcp_check_greeting(&greeting, key, challenge));
}

static void test_nonces_differ(void) {
  uint8_t challenge[TCP_NONCE_BYTES] = {0};
  struct tcp_greeting a = hello, b = hello;
  CHECK(tcp_greet(&a, key, challenge) && tcp_greet(&b, key, challenge));
  CHECK(memcmp(a.nonce, b.nonce, sizeof a.nonce) != 0);
  CHECK(memcmp(a.proof, b.proof, sizeof a.proof) != 0);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Vectors", test_vectors},
      {"Greeting", test_greeting},
      {"OneBit", test_one_bit},
      {"OtherVersion", test_other_version},
      {"NoncesDiffer", test_nonces_differ},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
