/*
 * How two contexts prove to each other that they know the key, before anything else is taken from either.
 *
 *   listener  a random nonce
 *   peer      a greeting: a nonce of its own, what it wants, and the hash of both and of that
 *   listener  another hash of the same
 *
 * Each side's hash covers a nonce that the other has just drawn, so what was recorded is worth nothing; labels differ,
 * so a side's own words cannot be sent back to it. What comes after is neither encrypted nor authenticated, as on RDMA.
 */
#define _GNU_SOURCE 1
#include "tcp_handshake.h"

#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static const uint8_t magic[8] = {'m', 'l', 'x', 'd', 'i', 's', 't', 1 /* version */};

bool tcp_random(uint8_t nonce[TCP_NONCE_BYTES]) { return getentropy(nonce, TCP_NONCE_BYTES) == 0; }

static void prove(char label, const struct tcp_greeting *greeting, const uint8_t key[SIPHASH_BYTES],
                  const uint8_t challenge[TCP_NONCE_BYTES], uint8_t proof[SIPHASH_BYTES]) {
  enum { GREETING = offsetof(struct tcp_greeting, proof) };
  uint8_t text[1 + TCP_NONCE_BYTES + GREETING];
  text[0] = (uint8_t)label;
  memcpy(text + 1, challenge, TCP_NONCE_BYTES);
  memcpy(text + 1 + TCP_NONCE_BYTES, greeting, GREETING);
  siphash(key, text, sizeof text, proof);
}

bool tcp_greet(struct tcp_greeting *greeting, const uint8_t key[SIPHASH_BYTES],
               const uint8_t challenge[TCP_NONCE_BYTES]) {
  memcpy(greeting->magic, magic, sizeof magic);
  if (!tcp_random(greeting->nonce)) return false;
  prove('g', greeting, key, challenge, greeting->proof);
  return true;
}

/* In a time that does not depend on where they differ. */
bool tcp_same_proof(const uint8_t a[SIPHASH_BYTES], const uint8_t b[SIPHASH_BYTES]) {
  volatile uint8_t difference = 0;
  for (int i = 0; i < SIPHASH_BYTES; i++) difference |= a[i] ^ b[i];
  return difference == 0;
}

bool tcp_check_greeting(const struct tcp_greeting *greeting, const uint8_t key[SIPHASH_BYTES],
                        const uint8_t challenge[TCP_NONCE_BYTES]) {
  uint8_t proof[SIPHASH_BYTES];
  prove('g', greeting, key, challenge, proof);
  return tcp_same_proof(proof, greeting->proof) && memcmp(greeting->magic, magic, sizeof magic) == 0;
}

void tcp_proof(const struct tcp_greeting *greeting, const uint8_t key[SIPHASH_BYTES],
               const uint8_t challenge[TCP_NONCE_BYTES], uint8_t proof[SIPHASH_BYTES]) {
  prove('a', greeting, key, challenge, proof);
}
