/* Protection domains, regions, queues and their events: the provider's functions under the lock of their context. */
#include "softverbs.h"

#include "../../providers/soft/soft.h"
#include "addresses.h"

#include <errno.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

static const struct verbs *lock(struct ibv_context *context) {
  pthread_mutex_lock(&context->mutex);
  return verbs_soft_profile(soft_context(context)->profile->name);
}

static void unlock(struct ibv_context *context) { pthread_mutex_unlock(&context->mutex); }

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  struct ibv_pd *pd = lock(context)->alloc_pd(context);
  unlock(context);
  return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
  struct ibv_context *context = pd->context;
  int error = lock(context)->dealloc_pd(pd);
  unlock(context);
  return error;
}

/* Peers write to this process's own memory. Some systems (Yama) let only those do that whom the process names, and all
 * that it can name is everyone: still only processes of the same user. */
static void admit_writers(void) {
#if defined(__linux__) && defined(PR_SET_PTRACER)
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* EINVAL where there is no such rule */
#endif
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
  struct ibv_mr *mr = lock(pd->context)->reg_mr(pd, addr, length, access);
  unlock(pd->context);
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

int ibv_dereg_mr(struct ibv_mr *mr) {
  struct ibv_context *context = mr->context;
  int error = lock(context)->dereg_mr(mr);
  unlock(context);
  return error;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int comp_vector) {
  struct ibv_cq *cq = lock(context)->create_cq(context, cqe, cq_context, channel, comp_vector);
  unlock(context);
  return cq;
}

/* As in the real library, this waits until the events that were taken are acknowledged; by another thread, perhaps, so
 * without the lock. */
int ibv_destroy_cq(struct ibv_cq *cq) {
  struct ibv_context *context = cq->context;
  lock(context);
  bool used = soft_cq(cq)->users;
  unlock(context);
  if (used) return soft_error(EBUSY);
  soft_async_settle(soft_context(context), cq);
  int error = lock(context)->destroy_cq(cq);
  unlock(context);
  return error;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  struct ibv_qp *qp = lock(pd->context)->create_qp(pd, attr);
  unlock(pd->context);
  return qp;
}

/* The queue pair keeps the addresses that the program knows. */
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask) {
  struct ibv_qp_attr found = *attr;
  int error = attr_mask & IBV_QP_AV ? addresses_find(&found.ah_attr) : 0;
  if (error) return soft_error(error);
  error = lock(qp->context)->modify_qp(qp, &found, attr_mask);
  if (!error && (attr_mask & IBV_QP_AV)) soft_qp(qp)->attr.ah_attr = attr->ah_attr;
  unlock(qp->context);
  return error;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr) {
  int error = lock(qp->context)->query_qp(qp, attr, attr_mask, init_attr);
  unlock(qp->context);
  return error;
}

int ibv_destroy_qp(struct ibv_qp *qp) {
  struct ibv_context *context = qp->context;
  soft_async_settle(soft_context(context), qp);
  int error = lock(context)->destroy_qp(qp);
  unlock(context);
  return error;
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
