/* A message that has arrived. It lives with its slot, or on the heap when it had to make room there. */
#pragma once

#include "wire.h"

#include <stdbool.h>

struct channel;

struct recv_desc {
  struct channel* channel;
  char* bytes; /* header, descriptor if it is the first of its transfer, payload */
  bool on_heap;
  bool posted;            /* its slot is the device's */
  struct recv_desc* next; /* the owner's */
};

static inline struct wire_header* recv_header(const struct recv_desc* desc) { return (struct wire_header*)desc->bytes; }
/* What stands behind the header, up to the payload. */
static inline const char* recv_behind_header(const struct recv_desc* desc) {
  bool links = recv_header(desc)->flags & WIRE_LINKS;
  return desc->bytes + sizeof(struct wire_header) + (links ? sizeof(struct wire_links) : 0);
}
static inline const struct wire_descriptor* recv_descriptor(const struct recv_desc* desc) {
  bool first = recv_header(desc)->flags & WIRE_FIRST;
  return first ? (const struct wire_descriptor*)recv_behind_header(desc) : 0;
}
/* All that may stand before it is as long as the header. */
static inline const char* recv_payload(const struct recv_desc* desc) {
  uint32_t flags = recv_header(desc)->flags;
  uint32_t before = 1 + flags % 2 + flags / 2 % 2; /* WIRE_FIRST, WIRE_LINKS */
  return desc->bytes + before * sizeof(struct wire_header);
}
