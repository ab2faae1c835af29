/* Protection domains, regions, queues and their events: the provider's functions under the lock of their context. */
#include "provider.h"

#include "../../providers/soft/async.h"

#include <errno.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  return LOCKED(context, verbs_of(context)->alloc_pd(context));
}

int ibv_dealloc_pd(struct ibv_pd *pd) { return LOCKED(pd->context, verbs_of(pd->context)->dealloc_pd(pd)); }

/* Peers write to this process's own memory. Some systems (Yama) permit that only to processes that this one names, and
 * all that it can name is every process: still only those of the same user. */
static void admit_writers(void) {
#if defined(__linux__) && defined(PR_SET_PTRACER)
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* EINVAL where there is no such rule */
#endif
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
  struct ibv_mr *mr = LOCKED(pd->context, verbs_of(pd->context)->reg_mr(pd, addr, length, access));
  if (mr && (access & IBV_ACCESS_REMOTE_WRITE)) admit_writers();
  return mr;
}

/* Regions have the addresses of their memory, and no others. */
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access) {
  if (iova == (uintptr_t)addr) return ibv_reg_mr(pd, addr, length, access);
  errno = EOPNOTSUPP;
  return NULL;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access) {
  return ibv_reg_mr_iova(pd, addr, length, iova, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr) { return LOCKED(mr->context, verbs_of(mr->context)->dereg_mr(mr)); }

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int comp_vector) {
  return LOCKED(context, verbs_of(context)->create_cq(context, cqe, cq_context, channel, comp_vector));
}

/* As in the real library, this waits until the events that were taken are acknowledged; perhaps by another thread, so
 * without the lock. */
int ibv_destroy_cq(struct ibv_cq *cq) {
  if (LOCKED(cq->context, soft_cq(cq)->users > 0)) return soft_error(EBUSY);
  soft_async_settle(soft_context(cq->context), cq);
  return LOCKED(cq->context, verbs_of(cq->context)->destroy_cq(cq));
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  return LOCKED(pd->context, verbs_of(pd->context)->create_qp(pd, attr));
}

/* The queue pair keeps the addresses that the program knows. */
static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *found, const struct ibv_qp_attr *attr, int attr_mask) {
  int error = verbs_of(qp->context)->modify_qp(qp, found, attr_mask);
  if (!error && (attr_mask & IBV_QP_AV)) soft_qp(qp)->attr.ah_attr = attr->ah_attr;
  return error;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask) {
  struct ibv_qp_attr found = *attr;
  int error = attr_mask & IBV_QP_AV ? find_address(qp->context, &found.ah_attr) : 0;
  if (error) return soft_error(error);
  return LOCKED(qp->context, modify_qp(qp, &found, attr, attr_mask));
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr) {
  return LOCKED(qp->context, verbs_of(qp->context)->query_qp(qp, attr, attr_mask, init_attr));
}

int ibv_destroy_qp(struct ibv_qp *qp) {
  soft_async_settle(soft_context(qp->context), qp);
  return LOCKED(qp->context, verbs_of(qp->context)->destroy_qp(qp));
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
  return soft_async_get(soft_context(context), event);
}

void ibv_ack_async_event(struct ibv_async_event *event) {
  if (event->event_type == IBV_EVENT_CQ_ERR)
    soft_async_acknowledge(soft_context(event->element.cq->context), event);
  else if (event->event_type == IBV_EVENT_QP_FATAL)
    soft_async_acknowledge(soft_context(event->element.qp->context), event);
}
