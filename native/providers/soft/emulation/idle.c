/* The fault `idle`: a queue pair that has carried nothing for too long is silent from then on. */
#include "idle.h"

#include "../clock.h"

void soft_idle_begin(struct soft_context *context) {
  uint64_t now = soft_clock_ns();
  for (int i = 0; i < SOFT_MAX_QP; i++) {
    struct soft_qp *qp = context->qps[i];
    if (!qp) continue;
    qp->carried_ns = now;
    qp->silent = false;
  }
}

void soft_idle_carried(struct soft_qp *qp) {
  if (!soft_idle_is_silent(qp)) qp->carried_ns = soft_clock_ns();
}

/* A queue pair that is newer than the fault begins with its first message. */
bool soft_idle_is_silent(struct soft_qp *qp) {
  uint64_t idle_ns = soft_context(qp->verbs.context)->faults.idle_ms * UINT64_C(1000000);
  if (!idle_ns) return false;
  uint64_t now = soft_clock_ns();
  if (!qp->carried_ns) qp->carried_ns = now;
  qp->silent |= now - qp->carried_ns > idle_ns;
  return qp->silent;
}
