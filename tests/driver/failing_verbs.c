/*
 * A libibverbs.so.1 for tests of what happens when RDMA cannot be set up: libsoftverbs, behind this, does the work, but
 * one verb fails, and the objects of the process are counted.
 *
 *   FAILING_VERB   verb:errno, such as "create_qp:16" or "modify_qp to RTR:22"; "create_qp+1:16" from the second call
 * on FAILING_PID    only in this process, and not in the one that lists the devices for it
 *
 * It prints "device opened" to stderr, "objects left: N" when a device is closed, and what was given back in the wrong
 * order.
 */
#include "verbs_abi.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int queue_pairs, regions, queues, domains;
static int (*real_post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);

/* The function of libsoftverbs. */
static void *next(const char *name) {
  void *found = dlsym(dlopen(SOFTVERBS, RTLD_NOW | RTLD_LOCAL), name);
  if (!found) abort();
  return found;
}
#define NEXT(name) ((__typeof__(&name))next(#name))

/* Sets errno where this call is to fail, to 0 perhaps. */
static bool fails(const char *verb) {
  static int passed;
  const char *wanted = getenv("FAILING_VERB");
  size_t length = strlen(verb);
  const char *pid = getenv("FAILING_PID");
  if (!wanted || !pid || atoi(pid) != getpid() || strncmp(wanted, verb, length) != 0) return false;
  const char *rest = wanted + length;
  int skip = *rest == '+' ? (int)strtol(rest + 1, (char **)&rest, 10) : 0;
  if (*rest != ':' || passed++ < skip) return false;
  errno = atoi(rest + 1);
  return true;
}

static void check_order(const char *what, int users) {
  if (users) fprintf(stderr, "given back too early: %s\n", what);
}

struct ibv_context *ibv_open_device(struct ibv_device *device);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int comp_vector);
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int ibv_destroy_qp(struct ibv_qp *qp);
int ibv_dereg_mr(struct ibv_mr *mr);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_dealloc_pd(struct ibv_pd *pd);
int ibv_close_device(struct ibv_context *context);

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr) {
  if (!fails("post_recv")) return real_post_recv(qp, wr, bad_wr);
  *bad_wr = wr;
  return errno;
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
  if (fails("open_device")) return NULL;
  struct ibv_context *context = NEXT(ibv_open_device)(device);
  if (!context) return NULL;
  fprintf(stderr, "device opened\n");
  real_post_recv = context->ops.post_recv;
  context->ops.post_recv = post_recv;
  return context;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  struct ibv_pd *pd = fails("alloc_pd") ? NULL : NEXT(ibv_alloc_pd)(context);
  domains += pd != NULL;
  return pd;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
  struct ibv_mr *mr = fails("reg_mr") ? NULL : NEXT(ibv_reg_mr)(pd, addr, length, access);
  regions += mr != NULL;
  return mr;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int comp_vector) {
  struct ibv_cq *cq = NULL;
  if (!fails("create_cq")) cq = NEXT(ibv_create_cq)(context, cqe, cq_context, channel, comp_vector);
  queues += cq != NULL;
  return cq;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  struct ibv_qp *qp = fails("create_qp") ? NULL : NEXT(ibv_create_qp)(pd, attr);
  queue_pairs += qp != NULL;
  return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
  static const char *const states[] = {"RESET", "INIT", "RTR", "RTS"};
  char verb[32];
  snprintf(verb, sizeof verb, "modify_qp to %s", states[attr->qp_state]);
  return fails(verb) ? errno : NEXT(ibv_modify_qp)(qp, attr, mask);
}

int ibv_destroy_qp(struct ibv_qp *qp) {
  int error = NEXT(ibv_destroy_qp)(qp);
  queue_pairs -= !error;
  return error;
}

int ibv_dereg_mr(struct ibv_mr *mr) {
  check_order("a region, before queue pairs", queue_pairs);
  int error = NEXT(ibv_dereg_mr)(mr);
  regions -= !error;
  return error;
}

int ibv_destroy_cq(struct ibv_cq *cq) {
  check_order("a completion queue, before queue pairs and regions", queue_pairs + regions);
  int error = NEXT(ibv_destroy_cq)(cq);
  queues -= !error;
  return error;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
  int error = NEXT(ibv_dealloc_pd)(pd);
  domains -= !error;
  return error;
}

int ibv_close_device(struct ibv_context *context) {
  int error = NEXT(ibv_close_device)(context);
  fprintf(stderr, "objects left: %d\n", queue_pairs + regions + queues + domains + (error != 0));
  return error;
}
