/* The traced verbs of one provider, for verbs_trace.c, which includes this once for each: TRACED(name) names its
 * functions, and INNER is the provider. errno is 0 before each verb, and afterwards what the provider has set. */

static struct ibv_context* TRACED(open_device)(struct ibv_device* device) {
  errno = 0;
  struct ibv_context* context = INNER->open_device(device);
  write_call(INNER->get_device_name(device), context ? 0 : -1, "open_device()");
  return context;
}

static int TRACED(close_device)(struct ibv_context* context) {
  char name[sizeof context->device->name]; /* a copy: to close it may free the device */
  snprintf(name, sizeof name, "%s", INNER->get_device_name(context->device));
  errno = 0;
  return write_call(name, INNER->close_device(context), "close_device()");
}

static int TRACED(query_device)(struct ibv_context* context, struct ibv_device_attr* attr) {
  errno = 0;
  int result = INNER->query_device(context, attr);
  return write_device(INNER->get_device_name(context->device), attr, result);
}

static int TRACED(query_port)(struct ibv_context* context, uint8_t port, struct ibv_port_attr* attr) {
  errno = 0;
  int result = INNER->query_port(context, port, attr);
  return write_port(INNER->get_device_name(context->device), port, attr, result);
}

static int TRACED(query_gid)(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid) {
  errno = 0;
  int result = INNER->query_gid(context, port, index, gid);
  return write_gid(INNER->get_device_name(context->device), port, index, gid, result);
}

static struct ibv_pd* TRACED(alloc_pd)(struct ibv_context* context) {
  errno = 0;
  struct ibv_pd* pd = INNER->alloc_pd(context);
  write_call(INNER->get_device_name(context->device), pd ? 0 : -1, "alloc_pd()");
  return pd;
}

static int TRACED(dealloc_pd)(struct ibv_pd* pd) {
  const char* name = INNER->get_device_name(pd->context->device);
  errno = 0;
  return write_call(name, INNER->dealloc_pd(pd), "dealloc_pd()");
}

static struct ibv_mr* TRACED(reg_mr)(struct ibv_pd* pd, void* addr, size_t length, int access) {
  errno = 0;
  struct ibv_mr* mr = INNER->reg_mr(pd, addr, length, access);
  /* Apple's library takes regions on boundaries of 16 KiB. */
  write_call(INNER->get_device_name(pd->context->device), mr ? 0 : -1,
             "reg_mr(address %% 16384 = %d, length %zu, access 0x%x)", (int)((uintptr_t)addr % 16384), length, access);
  return mr;
}

static int TRACED(dereg_mr)(struct ibv_mr* mr) {
  const char* name = INNER->get_device_name(mr->context->device);
  errno = 0;
  return write_call(name, INNER->dereg_mr(mr), "dereg_mr()");
}

static struct ibv_cq* TRACED(create_cq)(struct ibv_context* context, int cqe, void* cq_context,
                                        struct ibv_comp_channel* channel, int comp_vector) {
  errno = 0;
  struct ibv_cq* cq = INNER->create_cq(context, cqe, cq_context, channel, comp_vector);
  const char* device = INNER->get_device_name(context->device);
  if (cq)
    write_call(device, 0, "create_cq(cqe %d) -> cqe %d", cqe, cq->cqe);
  else
    write_call(device, -1, "create_cq(cqe %d)", cqe);
  return cq;
}

static int TRACED(destroy_cq)(struct ibv_cq* cq) {
  const char* name = INNER->get_device_name(cq->context->device);
  errno = 0;
  return write_call(name, INNER->destroy_cq(cq), "destroy_cq()");
}

static struct ibv_qp* TRACED(create_qp)(struct ibv_pd* pd, struct ibv_qp_init_attr* attr) {
  const struct ibv_qp_init_attr asked = *attr; /* the provider writes what it has made into it */
  errno = 0;
  struct ibv_qp* qp = INNER->create_qp(pd, attr);
  write_queue_pair(INNER->get_device_name(pd->context->device), &asked, attr, qp);
  return qp;
}

static int TRACED(modify_qp)(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask) {
  errno = 0;
  int result = INNER->modify_qp(qp, attr, attr_mask);
  return write_modify(INNER->get_device_name(qp->context->device), qp, attr, attr_mask, result);
}

static int TRACED(query_qp)(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask,
                            struct ibv_qp_init_attr* init_attr) {
  errno = 0;
  int result = INNER->query_qp(qp, attr, attr_mask, init_attr);
  return write_query(INNER->get_device_name(qp->context->device), qp, attr, attr_mask, result);
}

static int TRACED(destroy_qp)(struct ibv_qp* qp) {
  const char* name = INNER->get_device_name(qp->context->device);
  const uint32_t number = qp->qp_num;
  errno = 0;
  return write_call(name, INNER->destroy_qp(qp), "destroy_qp(qp 0x%x)", number);
}

static void TRACED(fill)(struct verbs* table) {
  table->open_device = TRACED(open_device);
  table->close_device = TRACED(close_device);
  table->query_device = TRACED(query_device);
  table->query_port = TRACED(query_port);
  table->query_gid = TRACED(query_gid);
  table->alloc_pd = TRACED(alloc_pd);
  table->dealloc_pd = TRACED(dealloc_pd);
  table->reg_mr = TRACED(reg_mr);
  table->dereg_mr = TRACED(dereg_mr);
  table->create_cq = TRACED(create_cq);
  table->destroy_cq = TRACED(destroy_cq);
  table->create_qp = TRACED(create_qp);
  table->modify_qp = TRACED(modify_qp);
  table->query_qp = TRACED(query_qp);
  table->destroy_qp = TRACED(destroy_qp);
}

#undef TRACED
#undef INNER
