/* Two sides of one process that are connected by TCP over the loopback interface. There is no thread behind a device,
 * so both have to be polled for anything to move. */
#pragma once

#include "../providers/soft/tcp.h"
#include "../verbs/wc_status.h"
#include "check.h"
#include "soft_side.h"

#include <sched.h>
#include <time.h>

#define TCP_PAIR_SECONDS 60

static const uint8_t tcp_key[VERBS_KEY_BYTES] = "fifteen letters";

#define TCP_DEFAULTS ((struct side_options){.cqe = 64, .max_send_wr = 8, .max_recv_wr = 8, .key = tcp_key})

static inline void tcp_turn(struct side* side) { CHECK_EQUAL(ibv_poll_cq(side->cq, 0, NULL), 0); }

/* Turns of both until `condition` holds. */
#define TCP_UNTIL(a, b, condition)                                                          \
  do {                                                                                      \
    time_t tcp_deadline = time(NULL) + TCP_PAIR_SECONDS;                                    \
    while (!(condition)) {                                                                  \
      tcp_turn(a);                                                                          \
      tcp_turn(b);                                                                          \
      CHECK(time(NULL) < tcp_deadline, "not after %d s: %s", TCP_PAIR_SECONDS, #condition); \
      sched_yield();                                                                        \
    }                                                                                       \
  } while (0)

static inline bool tcp_is_open(const struct side* side) { return soft_qp(side->qp)->tcp->state == TCP_OPEN; }

static inline void tcp_settle(struct side* a, struct side* b) { TCP_UNTIL(a, b, tcp_is_open(a) && tcp_is_open(b)); }

static inline void tcp_open_pair(struct side* a, struct side* b, struct side_options options) {
  side_open_pair(a, b, options);
  tcp_settle(a, b);
}

/* The next completion of `side`, while `other` has its turns, too. */
static inline struct ibv_wc tcp_next(struct side* side, struct side* other) {
  struct ibv_wc wc;
  int count;
  TCP_UNTIL(other, other, (count = ibv_poll_cq(side->cq, 1, &wc)) != 0);
  CHECK_EQUAL(count, 1);
  return wc;
}

static inline struct ibv_wc tcp_poll_one(struct side* side, struct side* other, uint64_t wr_id,
                                         enum ibv_wc_status status) {
  struct ibv_wc wc = tcp_next(side, other);
  CHECK_EQUAL(wc.wr_id, wr_id);
  CHECK(wc.status == status, "wr_id %llu completed with %s", (unsigned long long)wr_id,
        verbs_wc_status_name(wc.status));
  CHECK_EQUAL(wc.qp_num, side->qp->qp_num);
  return wc;
}

/* From RESET to RTS, with a packet number that no connection before had. */
static inline void tcp_reconnect(struct side* a, struct side* b, uint32_t psn) {
  struct side* sides[] = {a, b};
  for (int i = 0; i < 2; i++) {
    struct ibv_qp* qp = sides[i]->qp;
    struct side_address peer = side_address(sides[1 - i]);
    for (enum ibv_qp_state state = IBV_QPS_RESET; state <= IBV_QPS_RTS; state++) {
      struct ibv_qp_attr attr = side_attr(state, peer);
      attr.rq_psn = attr.sq_psn = psn;
      CHECK_EQUAL(verbs_soft()->modify_qp(qp, &attr, side_mask(state)), 0);
    }
  }
}
