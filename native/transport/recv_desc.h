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
static inline const struct wire_descriptor* recv_descriptor(const struct recv_desc* desc) {
  bool first = recv_header(desc)->flags & WIRE_FIRST;
  return first ? (const struct wire_descriptor*)(desc->bytes + sizeof(struct wire_header)) : 0;
}
static inline const char* recv_payload(const struct recv_desc* desc) {
  bool first = recv_header(desc)->flags & WIRE_FIRST;
  return desc->bytes + sizeof(struct wire_header) + (first ? sizeof(struct wire_descriptor) : 0);
}
