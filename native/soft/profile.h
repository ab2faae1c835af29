/*
 * What kind of device the provider plays: its limits and rules, enforced exactly, so that a program that breaks one
 * breaks it here first.
 *
 *   ideal      no more limits than this provider needs itself
 *   apple-tb5  RDMA over Thunderbolt 5 on macOS
 *   rxe        soft-RoCE of Linux on an Ethernet of 1500 bytes, as far as this provider reaches
 */
#ifndef MLXDIST_SOFT_PROFILE_H
#define MLXDIST_SOFT_PROFILE_H

#include "../verbs/verbs_abi.h"

#include <stdbool.h>
#include <stdint.h>

/* Apple's devices cut messages into frames of this size, and count their queues in them. */
#define SOFT_FRAME_BYTES 4096u

struct soft_profile {
  const char *name;
  uint32_t max_qp; /* on more, create_qp fails with ENOMEM; or, if shared, with EBUSY */
  uint32_t max_wr;
  uint32_t max_send_sge;
  uint32_t max_pd;
  uint32_t max_cq;
  uint32_t max_cqe;
  uint32_t max_mr;
  uint32_t max_message;
  uint32_t max_frames;   /* of the work requests in one queue; 0: frames do not matter. A SEND must have as many as the
                            receive that it meets, which otherwise fails with a length error */
  uint32_t mr_alignment; /* of a memory region's address */
  enum ibv_mtu active_mtu;
  bool shares_qp;        /* max_qp is for all processes that use the device */
  bool credit;           /* a SEND that meets no receive waits for one, and is not dropped */
  bool drops_too_long;   /* a SEND that is longer than the receive is dropped without taking it */
  bool immediate;        /* SEND_WITH_IMM */
  bool early_receives;   /* receives may be posted before RTS */
  bool late_regions;     /* memory regions work with queue pairs that were in RTR before */
  bool goes_to_err;      /* modify_qp to ERR */
};

enum soft_profiles { SOFT_IDEAL, SOFT_APPLE_TB5, SOFT_RXE, SOFT_PROFILES };

extern const struct soft_profile soft_profiles[SOFT_PROFILES];

/* How many frames a message takes. */
static inline uint32_t soft_frames(uint32_t bytes) {
  return bytes ? (uint32_t)(((uint64_t)bytes + SOFT_FRAME_BYTES - 1) / SOFT_FRAME_BYTES) : 1;
}

#endif
