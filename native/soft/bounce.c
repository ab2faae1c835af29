/*
 * Receives into memory of any kind, for programs that do not know alloc_memory. Each place of a queue pair's ring has
 * a piece of the arena as large as the largest receive that was posted there: the peer fills it, and poll_cq copies it.
 * So the peer touches nothing else of this process, whatever becomes of either.
 */
#include "soft.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct soft_bounce *at(const struct soft_qp *qp, uint64_t position) {
  return &qp->bounces[position & qp->rq_mask];
}

static void give_back(struct soft_qp *qp, struct soft_bounce *bounce) {
  if (bounce->memory) soft_free_memory(qp->verbs.context, bounce->memory, bounce->bytes);
  *bounce = (struct soft_bounce){0};
}

int soft_bounce_reserve(struct soft_qp *qp, uint32_t length) {
  if (!soft_context(qp->verbs.context)->bounces) return EINVAL;
  if (!qp->bounces) qp->bounces = calloc((size_t)qp->rq_mask + 1, sizeof *qp->bounces);
  if (!qp->bounces) return ENOMEM;
  struct soft_bounce *bounce = at(qp, qp->rq_posted);
  if (bounce->bytes >= length) return 0;
  give_back(qp, bounce);
  bounce->memory = soft_alloc_memory(qp->verbs.context, length);
  if (!bounce->memory) return ENOMEM;
  bounce->bytes = length;
  return 0;
}

uint64_t soft_bounce_post(struct soft_qp *qp, const struct ibv_sge *sge) {
  struct soft_bounce *bounce = at(qp, qp->rq_posted);
  bool direct = !sge->length || soft_in_arena(soft_context(qp->verbs.context), sge->addr, sge->length);
  bounce->to = direct ? NULL : (void *)(uintptr_t)sge->addr;
  return direct ? sge->addr : (uint64_t)(uintptr_t)bounce->memory;
}

void soft_bounce_take(struct soft_qp *qp, const struct ibv_wc *wc) {
  const struct soft_bounce *bounce = at(qp, qp->rq_head);
  if (bounce->to && wc->status == IBV_WC_SUCCESS && wc->opcode == IBV_WC_RECV)
    memcpy(bounce->to, bounce->memory, wc->byte_len);
}

void soft_bounce_free(struct soft_qp *qp) {
  for (uint64_t i = 0; qp->bounces && i <= qp->rq_mask; i++) give_back(qp, &qp->bounces[i]);
}
