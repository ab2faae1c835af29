/* A message: what a work request of the send queue carries. */
#pragma once

#include "soft.h"

#include <string.h>

static inline bool soft_is_write(enum ibv_wr_opcode opcode) {
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static inline uint64_t soft_message_length(const struct ibv_send_wr* wr) {
  uint64_t length = 0;
  for (int i = 0; i < wr->num_sge; i++) length += wr->sg_list[i].length;
  return length;
}

static inline uint32_t soft_message_frames(const struct ibv_send_wr* wr) {
  return soft_frames((uint32_t)soft_message_length(wr));
}

#define SOFT_SEND_IN_PART (1u << 31) /* a flag of our own: more packets of the message are to come */

/* The packet that begins at byte `begin` of a message in one piece, which has more bytes; `piece` is what it points at.
 */
static inline struct ibv_send_wr soft_packet(const struct ibv_send_wr* wr, uint32_t begin, struct ibv_sge* piece) {
  struct ibv_send_wr packet = *wr;
  uint32_t left = wr->sg_list->length - begin;
  *piece = (struct ibv_sge){wr->sg_list->addr + begin, left, wr->sg_list->lkey};
  packet.sg_list = piece;
  if (left <= SOFT_FRAME_BYTES) return packet;
  piece->length = SOFT_FRAME_BYTES;
  packet.send_flags |= SOFT_SEND_IN_PART;
  return packet;
}

/* `length` bytes of it, to `to`. */
static inline void soft_copy_message(char* to, const struct ibv_send_wr* wr, uint32_t length) {
  for (int i = 0; i < wr->num_sge; i++) {
    const struct ibv_sge* sge = &wr->sg_list[i];
    uint32_t part = sge->length < length ? sge->length : length;
    if (part) memcpy(to, (const void*)(uintptr_t)sge->addr, part);
    to += part;
    length -= part;
  }
}
