/*
 * What travels between two ranks: the header of every message and the descriptor of every transfer.
 *
 * A *transfer* carries bytes from one rank to another within one operation: all_reduce between two ranks
 * is two transfers, one each way. It is cut into messages of at most one slot; its first message carries
 * the descriptor, so that a receiver knows at once when the sender is in another operation, or has
 * another dtype or shape.
 *
 * All fields are little-endian, as every machine is that MLX runs on. docs/architecture.md has a picture.
 */
#pragma once

#include "checksum.h"
#include "mlxdist.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define WIRE_MAGIC 0x3244584du /* "MXD2" */

enum wire_kind {
  WIRE_DATA = 1,
  WIRE_ACK = 2,   /* acknowledgement and credit that found no data to ride on: has no number, may be lost */
  WIRE_ABORT = 3, /* the sender has failed: payload is a wire_abort and the text of its first error */
  WIRE_SKIP = 4,  /* has the number of a message that left by another link: nothing else is in it */
};

enum wire_flags {
  WIRE_FIRST = 1,        /* first message of its transfer: a descriptor stands before the payload */
  WIRE_LINKS = 2,        /* the acknowledgements of further links stand behind the header */
  WIRE_CTS = 4,          /* `cts` counts */
  WIRE_MEET = 8,         /* acknowledgement: reply once the receiver has come to that operation: `offset` */
  WIRE_FAILOVER = 16,    /* data: left by another link before, and may have arrived */
  WIRE_PROBE_REPLY = 16, /* acknowledgement: to one with WIRE_PROBE */
  WIRE_PROBE = 32,       /* acknowledgement: reply on this link */
  WIRE_ACK_REQ = 32,     /* data: the sender waits for the acknowledgement */
};

/* Every pair of ranks has two queue pairs a link. Small messages have their own, so that they neither wait behind
 * bulk data nor take up its large slots. */
enum wire_channel { WIRE_EAGER = 0, WIRE_BULK = 1 };
#define WIRE_MAX_LINKS 4
#define WIRE_CHANNELS (2 * WIRE_MAX_LINKS)

/* What every message says of the two channels of a link from its receiver to its sender. */
struct wire_acks {
  uint32_t ack[2];     /* last sequence that arrived there, in order */
  uint16_t credits[2]; /* receives that are posted for later ones */
};

/* The `index` of messages of send, recv and sendrecv, which have places of their own: those of each pair of ranks and
 * direction. */
#define WIRE_MESSAGE MLXDIST_MESSAGE

struct wire_header {
  uint32_t magic;
  uint8_t kind;
  uint8_t flags;
  uint16_t group;        /* 0: the world */
  uint32_t sequence;     /* of this message on its queue pair, from WIRE_START + 1; wraps; in an acknowledgement, which
                            has none: ordered collectives with the receiver that the sender has come to */
  uint32_t place;        /* of the operation in the order of its group (engine/places.h), from WIRE_START + 1; wraps; in
                            an abort, the first one of this group that has not ended well; in an acknowledgement, the
                            operation up to which ranks meet in any case (engine/meeting.h) */
  uint64_t offset;       /* bytes of the transfer before this message; in an acknowledgement with WIRE_MEET its request
                            (engine/meeting.h) */
  uint32_t length;       /* payload bytes */
  uint32_t checksum;     /* CRC32C of the message without this field, where MLXDIST_CHECKSUM asks for it */
  struct wire_acks acks; /* of the first link */
  uint32_t cts;          /* clear to send: the place, in `group`, of an operation that the sender of this header has
                            begun to receive in */
  uint64_t label;        /* of the first message of a transfer (engine/label.h); in an acknowledgement, sends to the
                            receiver that the sender has come to */
  uint16_t index;        /* of the transfer, among those of its operation between these ranks in this direction */
  uint16_t epoch;        /* of the world: 0, until worlds shrink and grow */
  uint8_t naks;          /* a mask of channels: retransmit what follows `ack` there */
  uint8_t reserved[3];
};
static_assert(sizeof(struct wire_header) == 64, "one cache line, and payloads stay aligned for SIMD");

/* Where ranks are joined by several links, this stands behind each header. */
struct wire_links {
  struct wire_acks acks[WIRE_MAX_LINKS - 1]; /* of the others */
  uint8_t dead_links; /* a mask of links that the sender holds for dead: what they bring now may have come by another */
  uint8_t reserved[63 - (WIRE_MAX_LINKS - 1) * sizeof(struct wire_acks)];
};
static_assert(sizeof(struct wire_links) == 64, "payloads stay aligned for SIMD");

/* What a message says of a link. One whose sender has fewer links says nothing of the others. */
static inline const struct wire_acks* wire_acks(const struct wire_header* header, uint32_t link) {
  return link == 0 ? &header->acks : &((const struct wire_links*)(header + 1))->acks[link - 1];
}

/* `bytes`: a message, at least its header. */
static inline uint32_t wire_checksum(const char* bytes, uint64_t length) {
  const uint64_t field = offsetof(struct wire_header, checksum), behind = field + sizeof(uint32_t);
  return checksum(checksum(0, bytes, field), bytes + behind, length - behind);
}

struct wire_descriptor {
  uint8_t operation; /* mlxdist_operation or enum wire_operation */
  uint8_t reduction; /* mlxdist_op, 0 where there is none */
  uint8_t dtype;     /* mlxdist_dtype */
  uint8_t ndim;
  int16_t root;      /* -1 where there is none */
  uint8_t algorithm; /* mlxdist_algorithm */
  uint8_t reserved;
  int64_t shape[6];
  uint64_t bytes; /* of this transfer */
};
static_assert(sizeof(struct wire_descriptor) == 64, "payloads stay aligned for SIMD");

/* The operations beside those of mlxdist_operation. */
enum wire_operation {
  WIRE_SEND = MLXDIST_ALL_TO_ALL + 1, /* send, recv and both halves of sendrecv */
  WIRE_FINALIZE,
  WIRE_ALL_TO_ALL_V,
  WIRE_SPLIT,
};

struct wire_abort {
  int32_t status; /* mlxdist_status */
};

/* Sequences wrap after an hour of small messages, so they are compared by difference; and they begin a little
 * before the end, so that every job shows that this works. */
#define WIRE_START 0xffffff80u

static inline int wire_at_least(uint32_t sequence, uint32_t limit) { return (int32_t)(sequence - limit) >= 0; }
