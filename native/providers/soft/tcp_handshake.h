/* How two contexts prove to each other that they know the key. */
#pragma once

#include "tcp.h"

bool tcp_random(uint8_t nonce[TCP_NONCE_BYTES]);
/* Fills in magic, nonce and proof. */
bool tcp_greet(struct tcp_greeting* greeting, const uint8_t key[SIPHASH_BYTES],
               const uint8_t challenge[TCP_NONCE_BYTES]);
bool tcp_check_greeting(const struct tcp_greeting* greeting, const uint8_t key[SIPHASH_BYTES],
                        const uint8_t challenge[TCP_NONCE_BYTES]);
void tcp_proof(const struct tcp_greeting* greeting, const uint8_t key[SIPHASH_BYTES],
               const uint8_t challenge[TCP_NONCE_BYTES], uint8_t proof[SIPHASH_BYTES]);
bool tcp_same_proof(const uint8_t a[SIPHASH_BYTES], const uint8_t b[SIPHASH_BYTES]);
