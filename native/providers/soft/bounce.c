/*
 * Receives into memory of any kind, for programs that do not know alloc_memory. While such a receive is posted it has a
 * piece of the arena: the peer fills it, and poll_cq copies it. So the peer touches nothing else of this process,
 * whatever becomes of either.
 *
 * A piece whose receive has ended is kept for the next one of its size, of any queue pair: pages that were written once
 * cost less than new ones. Those that are kept go back to the arena when it is full, or a queue pair is destroyed.
 */
#include "bounce.h"

#include "memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct soft_bounce **at(const struct soft_qp *qp, uint64_t position) {
  return &qp->bounces[position & qp->rq_mask];
}

/* Where pieces of that size are kept, and perhaps others. */
static struct soft_bounce **kept(struct soft_context *context, size_t bytes) {
  return &context->kept_bounces[bytes / SEGMENT_PAGE % SOFT_BOUNCE_LISTS];
}

static struct soft_bounce *take_kept(struct soft_context *context, size_t bytes) {
  struct soft_bounce **list = kept(context, bytes), *bounce = *list;
  if (!bounce || bounce->bytes != bytes) return NULL;
  *list = bounce->next;
  return bounce;
}

static struct soft_bounce *make(struct soft_context *context, size_t bytes) {
  struct soft_bounce *bounce = calloc(1, sizeof *bounce);
  if (!bounce) return NULL;
  bounce->bytes = bytes;
  bounce->memory = soft_alloc_memory(&context->verbs, bytes);
  if (bounce->memory) return bounce;
  free(bounce);
  return NULL;
}

void soft_bounce_empty(struct soft_context *context) {
  for (int i = 0; i < SOFT_BOUNCE_LISTS; i++)
    while (context->kept_bounces[i]) {
      struct soft_bounce *bounce = context->kept_bounces[i];
      context->kept_bounces[i] = bounce->next;
      soft_free_memory(&context->verbs, bounce->memory, bounce->bytes);
      free(bounce);
    }
}

int soft_bounce_reserve(struct soft_qp *qp, uint32_t length) {
  struct soft_context *context = soft_context(qp->verbs.context);
  if (!context->bounces) return EINVAL;
  if (!qp->bounces) qp->bounces = calloc((size_t)qp->rq_mask + 1, sizeof *qp->bounces);
  if (!qp->bounces) return ENOMEM;
  size_t bytes = soft_whole_pages(length);
  struct soft_bounce *bounce = take_kept(context, bytes);
  if (!bounce) bounce = make(context, bytes);
  if (!bounce) {
    soft_bounce_empty(context);
    bounce = make(context, bytes);
  }
  *at(qp, qp->rq_posted) = bounce;
  return bounce ? 0 : ENOMEM;
}

uint64_t soft_bounce_post(struct soft_qp *qp, const struct ibv_sge *sge) {
  struct soft_bounce *bounce = *at(qp, qp->rq_posted);
  if (!bounce) return sge->addr;
  bounce->to = (void *)(uintptr_t)sge->addr;
  return (uint64_t)(uintptr_t)bounce->memory;
}

void soft_bounce_take(struct soft_qp *qp, const struct ibv_wc *wc) {
  const struct soft_bounce *bounce = *at(qp, qp->rq_head);
  if (bounce && wc->status == IBV_WC_SUCCESS && wc->opcode == IBV_WC_RECV)
    memcpy(bounce->to, bounce->memory, wc->byte_len);
  soft_bounce_drop(qp, qp->rq_head);
}

/* A peer that stopped in the middle of a copy may finish it here: then the piece is not used again. */
void soft_bounce_drop(struct soft_qp *qp, uint64_t position) {
  struct soft_context *context = soft_context(qp->verbs.context);
  struct soft_bounce *bounce = *at(qp, position);
  if (!bounce) return;
  *at(qp, position) = NULL;
  if (context->tainted) {
    free(bounce);
    return;
  }
  struct soft_bounce **list = kept(context, bounce->bytes);
  bounce->next = *list;
  *list = bounce;
}
