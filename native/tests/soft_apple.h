/* Sides that play Macs at Thunderbolt cables. */
#pragma once

#include "soft_side.h"

#include <unistd.h>

#define FRAME SOFT_FRAME_BYTES

/* A host for this test alone: no other test shares its queue pairs. */
static inline struct side_options options_of(uint32_t host) {
  return (struct side_options){
      .cqe = 256, .max_send_wr = 32, .max_recv_wr = 32, .profile = "apple-tb5", .host = (uint32_t)getpid() * 8 + host};
}

/* Two hosts at one cable. */
static inline void open_connected(struct side* a, struct side* b) {
  side_open(a, options_of(0));
  side_open(b, options_of(1));
  side_connect(a, b);
}
