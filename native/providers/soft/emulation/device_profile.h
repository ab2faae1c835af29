/*
 * What kind of device the provider plays: its limits and rules, enforced exactly, so that a program that breaks one
 * breaks it here first.
 *
 *   ideal           no more limits than this provider needs itself
 *   apple-tb5       RDMA over Thunderbolt 5 on macOS 26.3 and later
 *   apple-tb5-26.2  on macOS 26.2, where a message is one frame
 *   apple-tb5-27    on macOS 27, as one report has it: a SEND crosses in packets, each of which takes a receive
 *   apple-odd       like apple-tb5, but what no program is known to do there fails
 *   rxe             soft-RoCE of Linux on an Ethernet of 1500 bytes, as far as this provider reaches
 */
#pragma once

#include "../../../verbs/verbs_abi.h"

#include <stdbool.h>
#include <stdint.h>

/* Apple's devices cut messages into frames of this size, and count their queues in them. */
#define SOFT_FRAME_BYTES 4096u

struct soft_profile {
  const char* name;
  int devices;     /* that it lists */
  uint32_t max_qp; /* on more, create_qp fails with ENOMEM; or, if shared, with EBUSY */
  uint32_t max_wr;
  uint32_t max_send_sge;
  uint32_t max_pd;
  uint32_t max_cq;
  uint32_t max_cqe;
  uint32_t max_mr;
  uint64_t max_mr_size; /* 0: any */
  uint32_t max_message;
  uint32_t min_wr;         /* queues are made deeper than asked for: at least so deep, and 2^n - 1 */
  uint32_t mr_alignment;   /* of a memory region's address */
  enum ibv_mtu active_mtu; /* that the port says, */
  enum ibv_mtu path_mtu;   /* and the most that a queue pair takes */
  bool frames;             /* queues are counted in frames. A SEND must have as many as the receive that it meets, which
                              otherwise fails with a length error */
  bool packets;    /* a SEND crosses in packets of one frame, each of which takes the next receive; the completions of
                      all but the last have LOC_LEN_ERR, and do no harm. A receive of more than a frame fails, and
                      an empty SEND neither arrives nor completes */
  bool domain_gid; /* index 0 of the addresses is a UUID, by which nothing is reached */
  bool shares_qp;  /* max_qp is for all processes that use the device */
  bool rnr_wait;   /* a SEND that meets no receive waits for one, and is not dropped */
  bool drops_too_long;   /* a SEND that is longer than the receive is dropped without taking it */
  bool immediate;        /* SEND_WITH_IMM */
  bool writes;           /* RDMA_WRITE, with immediate data too */
  bool early_receives;   /* receives may be posted before RTS */
  bool late_regions;     /* memory regions work with queue pairs that were in RTR before, and may go while these are
                            there; else a queue pair maps the regions of its domain at RTR, until it is destroyed */
  bool single_peer;      /* a device reaches the first peer that it was connected to and no other, and a process
                          opens it once */
  bool strict_order;     /* regions are deregistered before completion queues are destroyed, these before domains */
  int region_access;     /* the flags that a region must have, these and no others; 0: any */
  int queue_pair_access; /* likewise a queue pair, from INIT on */
  int access_error;      /* with which other flags are rejected; 0: a region with errno 0, a queue pair with ENOTSUP */
  bool no_length;        /* byte_len of completions is 0 */
  bool no_depth;         /* query_qp fails in RESET, and reports queues of depth 0 later */
  bool signaled_only;    /* a SEND that is not signaled never leaves the send queue */
  bool leaks_domains;    /* max_pd is for all processes that use the device, killed ones too: see domains.c */
  bool short_regions;    /* a region lies within 4 GiB of the address space, between multiples of that */
  bool goes_to_err;      /* modify_qp to ERR */
};

enum soft_profiles {
  SOFT_IDEAL,
  SOFT_APPLE_TB5,
  SOFT_APPLE_TB5_26_2,
  SOFT_APPLE_TB5_27,
  SOFT_APPLE_ODD,
  SOFT_RXE,
  SOFT_PROFILES
};

/* The most that a profile lists: for 8 ranks with two cables between each pair, or 4 with four. */
#define SOFT_DEVICES 14

extern const struct soft_profile soft_profiles[SOFT_PROFILES];

/* How many frames a message takes. */
static inline uint32_t soft_frames(uint32_t bytes) {
  return bytes ? (uint32_t)(((uint64_t)bytes + SOFT_FRAME_BYTES - 1) / SOFT_FRAME_BYTES) : 1;
}

/* The largest receive that a message arrives in. */
static inline uint32_t soft_max_receive(const struct soft_profile* profile) {
  return profile->packets ? SOFT_FRAME_BYTES : profile->max_message;
}

/* Whether a message, or a packet of one, may go into a receive. */
static inline bool soft_fits(const struct soft_profile* profile, uint32_t message, uint32_t receive) {
  if (profile->packets) return message <= receive && receive <= SOFT_FRAME_BYTES;
  return message <= receive && (!profile->frames || soft_frames(message) == soft_frames(receive));
}
