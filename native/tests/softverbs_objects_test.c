/* What a program finds and creates through <infiniband/verbs.h>: devices, queues, their limits and their events. */
#define _GNU_SOURCE
#include "check.h"
#include "softverbs_end.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>

#define GIDS 2 /* of a device */

static void test_devices(void) {
  int count = 0;
  struct ibv_device **list = ibv_get_device_list(&count);
  CHECK(list && count >= 2 && !list[count], "%d devices", count);
  for (int i = 0; i < count; i++) {
    CHECK(strlen(ibv_get_device_name(list[i])) > 0);
    for (int j = 0; j < i; j++) {
      CHECK(strcmp(ibv_get_device_name(list[i]), ibv_get_device_name(list[j])) != 0);
      CHECK(ibv_get_device_guid(list[i]) != ibv_get_device_guid(list[j]));
      CHECK(ibv_get_device_index(list[i]) != ibv_get_device_index(list[j]));
    }
  }
  struct ibv_context *context = ibv_open_device(list[1]);
  CHECK(context && context->device == list[1]);
  struct ibv_device_attr device;
  CHECK_EQUAL(ibv_query_device(context, &device), 0);
  CHECK(device.phys_port_cnt == 1 && device.max_qp > 0 && device.node_guid == ibv_get_device_guid(list[1]));
  ibv_free_device_list(list);

  struct ibv_port_attr port;
  CHECK_EQUAL(ibv_query_port(context, PORT, &port), 0);
  CHECK(port.state == IBV_PORT_ACTIVE && port.gid_tbl_len >= 1 && port.link_layer == IBV_LINK_LAYER_ETHERNET);
  CHECK_EQUAL(ibv_query_port(context, 2, &port), EINVAL);
  uint16_t pkey;
  CHECK_EQUAL(ibv_query_pkey(context, PORT, 0, &pkey), 0);
  CHECK_EQUAL(ibv_query_pkey(context, PORT, 1, &pkey), EINVAL);
  CHECK_EQUAL(ibv_close_device(context), 0);
}

static void test_addresses(void) {
  struct ibv_context *contexts[2] = {open_device(), open_device()};
  static const uint8_t beginnings[GIDS][12] = {{0xfe, 0x80}, {[10] = 0xff, [11] = 0xff}};
  static const unsigned types[GIDS] = {IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2};
  struct ibv_gid_entry entry, table[GIDS];
  CHECK_EQUAL(_ibv_query_gid_table(contexts[0], table, GIDS - 1, 0, sizeof *table), -EINVAL);
  CHECK_EQUAL(_ibv_query_gid_table(contexts[0], table, GIDS, 0, sizeof *table), GIDS);
  union ibv_gid gids[2];
  for (int index = 0; index < GIDS; index++) {
    for (int i = 0; i < 2; i++) CHECK_EQUAL(ibv_query_gid(contexts[i], PORT, index, &gids[i]), 0);
    CHECK(memcmp(&gids[0], &gids[1], sizeof gids[0]) != 0, "two contexts have one address");
    CHECK_EQUAL(memcmp(&gids[0], beginnings[index], index ? 12 : 2), 0);
    CHECK_EQUAL(_ibv_query_gid_ex(contexts[0], PORT, (uint32_t)index, &entry, 0, sizeof entry), 0);
    CHECK(memcmp(&entry, &table[index], sizeof entry) == 0 && memcmp(&entry.gid, &gids[0], sizeof entry.gid) == 0);
    CHECK(entry.gid_type == types[index] && entry.gid_index == (uint32_t)index && entry.port_num == PORT);
  }
  for (int index = -1; index <= GIDS; index += GIDS + 1) {
    errno = 0;
    CHECK_EQUAL(ibv_query_gid(contexts[0], PORT, index, &gids[0]), -1);
    CHECK_EQUAL(errno, EINVAL);
  }
  CHECK_EQUAL(_ibv_query_gid_ex(contexts[0], PORT, GIDS, &entry, 0, sizeof entry), ENODATA);
  for (int i = 0; i < 2; i++) CHECK_EQUAL(ibv_close_device(contexts[i]), 0);
}

/* Each of the two addresses leads to the peer; the queue pair keeps the one that it was given. */
static void test_connected_by_either_address(void) {
  for (int of_a = 0; of_a < GIDS; of_a++) {
    char *memory = malloc(BYTES);
    struct end a = open_end(memory, BYTES, 4 * DEPTH, 1), b = open_end(memory, BYTES, 4 * DEPTH, 1);
    a.gid_index = of_a;
    b.gid_index = 1;
    join(&a, &b);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK_EQUAL(ibv_query_qp(a.qp, &attr, IBV_QP_AV, &init), 0);
    struct address of_b = address_of(&b);
    CHECK_EQUAL(memcmp(&attr.ah_attr.grh.dgid, &of_b.gid, sizeof of_b.gid), 0);
    CHECK_EQUAL(attr.ah_attr.grh.sgid_index, 1);
    fill(memory, 100, 3);
    CHECK_EQUAL(receive(&b, 1, 1000, 100), 0);
    CHECK_EQUAL(send_bytes(&a, 2, 100), 0);
    poll_one(&b, 1, IBV_WC_SUCCESS);
    poll_one(&a, 2, IBV_WC_SUCCESS);
    verify(memory + 1000, 100, 3);
    close_end(&a);
    close_end(&b);
    free(memory);
  }
}

/* On macOS the contexts have lost their names by then. */
static void test_later_queue_pairs_by_ipv4(void) {
  struct end a, b;
  open_pair(&a, &b);
  struct end later_a = a, later_b = b;
  later_a.gid_index = later_b.gid_index = 1;
  CHECK((later_a.qp = create_qp(&a, 1)) && (later_b.qp = create_qp(&b, 1)));
  to_init(later_a.qp);
  to_init(later_b.qp);
  join(&later_a, &later_b);
  CHECK_EQUAL(receive(&later_b, 1, 0, 100), 0);
  CHECK_EQUAL(send_bytes(&later_a, 2, 100), 0);
  poll_one(&later_b, 1, IBV_WC_SUCCESS);
  poll_one(&later_a, 2, IBV_WC_SUCCESS);
  CHECK_EQUAL(ibv_destroy_qp(later_a.qp), 0);
  CHECK_EQUAL(ibv_destroy_qp(later_b.qp), 0);
  close_pair(&a, &b);
}

static void test_addresses_of_no_one(void) {
  char *memory = malloc(BYTES);
  struct end a = open_end(memory, BYTES, 4 * DEPTH, 1), b = open_end(memory, BYTES, 4 * DEPTH, 1);
  b.gid_index = 1;
  struct address peer = address_of(&b);
  peer.gid_index = GIDS;
  CHECK_EQUAL(to_rtr(a.qp, &peer), EINVAL);
  peer.gid_index = 1;
  close_end(&b);
  CHECK_EQUAL(to_rtr(a.qp, &peer), ENOENT);
  memcpy(&peer.gid.raw[12], (uint8_t[4]){127, 0, 0, 1}, 4);
  CHECK_EQUAL(to_rtr(a.qp, &peer), ENOENT);
  a.gid_index = 1;
  peer = address_of(&a);
  CHECK_EQUAL(to_rtr(a.qp, &peer), 0);
  close_end(&a);
  free(memory);
}

static void test_names(void) {
  CHECK(strcmp(ibv_wc_status_str(IBV_WC_LOC_LEN_ERR), "local length error") == 0);
  CHECK(strcmp(ibv_wc_status_str((enum ibv_wc_status)1000), "unknown") == 0);
  CHECK(strcmp(ibv_port_state_str(IBV_PORT_ACTIVE), "active") == 0);
  CHECK(strcmp(ibv_event_type_str(IBV_EVENT_CQ_ERR), "CQ error") == 0);
  CHECK(strcmp(ibv_node_type_str(IBV_NODE_CA), "InfiniBand channel adapter") == 0);
  CHECK(strcmp(ibv_node_type_str(IBV_NODE_UNKNOWN), "unknown") == 0);
}

static void test_unsignaled(void) {
  char *memory = malloc(BYTES);
  struct end a = open_end(memory, BYTES, 4 * DEPTH, 0), b = open_end(memory, BYTES, 4 * DEPTH, 0);
  join(&a, &b);
  struct ibv_sge sge;
  struct ibv_send_wr wrs[3], *bad = NULL;
  for (int i = 0; i < 3; i++) {
    wrs[i] = request(&a, &sge, IBV_WR_SEND, (uint64_t)i, 8, NULL, 0);
    wrs[i].next = i < 2 ? &wrs[i + 1] : NULL;
  }
  wrs[0].next = NULL;
  for (int i = 0; i < DEPTH - 2; i++) CHECK_EQUAL(ibv_post_send(a.qp, wrs, &bad), 0);
  expect_nothing(&a);
  /* Two slots are left for three requests. */
  wrs[0].next = &wrs[1];
  wrs[1].send_flags = IBV_SEND_SIGNALED;
  CHECK_EQUAL(ibv_post_send(a.qp, wrs, &bad), ENOMEM);
  CHECK(bad == &wrs[2], "bad_wr does not point at the one that did not fit");
  poll_one(&a, 1, IBV_WC_SUCCESS); /* frees all slots before it, too */
  for (int i = 0; i < DEPTH; i++) CHECK_EQUAL(ibv_post_send(a.qp, &wrs[2], &bad), 0);
  CHECK_EQUAL(ibv_post_send(a.qp, &wrs[2], &bad), ENOMEM);
  close_end(&a);
  close_end(&b);
  free(memory);
}

static bool is_readable(int fd) {
  struct pollfd readable = {.fd = fd, .events = POLLIN};
  return poll(&readable, 1, 0) == 1;
}

static void test_overrun(void) {
  char *memory = malloc(BYTES);
  struct end a = open_end(memory, BYTES, 2, 1), b = open_end(memory, BYTES, 4 * DEPTH, 1);
  join(&a, &b);
  CHECK(!is_readable(a.context->async_fd));
  for (unsigned i = 0; i < 3; i++) CHECK_EQUAL(send_bytes(&a, i, 1), 0);
  CHECK_EQUAL(state_of(a.qp), IBV_QPS_ERR);

  CHECK(is_readable(a.context->async_fd));
  struct ibv_async_event event;
  CHECK_EQUAL(ibv_get_async_event(a.context, &event), 0);
  CHECK(event.event_type == IBV_EVENT_CQ_ERR, "%s", ibv_event_type_str(event.event_type));
  CHECK(event.element.cq == a.cq);
  ibv_ack_async_event(&event);
  CHECK_EQUAL(ibv_get_async_event(a.context, &event), 0);
  CHECK(event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == a.qp);
  ibv_ack_async_event(&event);
  CHECK(!is_readable(a.context->async_fd));
  CHECK_EQUAL(fcntl(a.context->async_fd, F_SETFL, O_NONBLOCK), 0);
  CHECK_EQUAL(ibv_get_async_event(a.context, &event), -1);
  CHECK_EQUAL(errno, EAGAIN);

  struct ibv_wc wc[4];
  CHECK_EQUAL(ibv_poll_cq(a.cq, 4, wc), 2);
  CHECK(ibv_poll_cq(a.cq, 4, wc) < 0);
  close_end(&a);
  close_end(&b);
  free(memory);
}

static void *acknowledge_later(void *of) {
  struct ibv_async_event *event = of;
  nanosleep(&(struct timespec){.tv_nsec = 20 * 1000 * 1000}, NULL);
  struct ibv_cq *cq = event->element.cq;
  event->event_type = IBV_EVENT_CQ_ERR;
  CHECK(cq->cqe == 2, "the queue was destroyed before its event was acknowledged");
  ibv_ack_async_event(event);
  return NULL;
}

/* Events that are not taken go with their object; one that is taken keeps it until it is acknowledged. */
static void test_destroyed_with_events(void) {
  char *memory = malloc(BYTES);
  struct end a = open_end(memory, BYTES, 2, 1), b = open_end(memory, BYTES, 4 * DEPTH, 1);
  join(&a, &b);
  for (unsigned i = 0; i < 3; i++) CHECK_EQUAL(send_bytes(&a, i, 1), 0);
  struct ibv_async_event event;
  CHECK_EQUAL(ibv_get_async_event(a.context, &event), 0);
  CHECK_EQUAL(event.event_type, IBV_EVENT_CQ_ERR);
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, acknowledge_later, &event), 0);
  close_end(&a);
  CHECK_EQUAL(pthread_join(thread, NULL), 0);
  close_end(&b);
  free(memory);
}

static void test_references(void) {
  struct end a, b;
  open_pair(&a, &b);
  CHECK_EQUAL(ibv_dealloc_pd(a.pd), EBUSY);
  CHECK_EQUAL(ibv_destroy_cq(a.cq), EBUSY);
  CHECK_EQUAL(receive(&a, 1, 0, 8), 0);
  CHECK_EQUAL(ibv_dereg_mr(a.mr), EBUSY);
  close_pair(&a, &b);
}

/* As with the real library: programs such as ib_send_bw leave something and take an error for a failure. The peer does
 * not notice, and the device can be opened again. */
static void test_closed_with_objects_left(void) {
  static struct end left; /* static: what is left stays reachable, and is no leak */
  struct end a, b;
  open_pair(&left, &b);
  CHECK_EQUAL(receive(&left, 1, 0, 8), 0);
  CHECK_EQUAL(ibv_close_device(left.context), 0);
  CHECK_EQUAL(send_bytes(&b, 2, 8), 0);
  poll_one(&b, 2, IBV_WC_SUCCESS);
  close_end(&b);
  free(b.memory);
  open_pair(&a, &b);
  close_pair(&a, &b);
}

static void test_rejected(void) {
  struct end a, b;
  open_pair(&a, &b);
  errno = 0;
  CHECK(!ibv_create_comp_channel(a.context));
  CHECK_EQUAL(errno, EOPNOTSUPP);
  CHECK_EQUAL(ibv_req_notify_cq(a.cq, 0), EOPNOTSUPP);
  CHECK_EQUAL(ibv_resize_cq(a.cq, 100), EOPNOTSUPP);
  CHECK(!ibv_reg_mr_iova(a.pd, a.memory, 8, 0x1000, ACCESS));
  CHECK_EQUAL(errno, EOPNOTSUPP);
  struct ibv_ah_attr to = {.is_global = 1, .port_num = PORT};
  errno = 0;
  CHECK(!ibv_create_ah(a.pd, &to));
  CHECK_EQUAL(errno, EOPNOTSUPP);
  CHECK(!ibv_reg_mr(a.pd, a.memory, 8, IBV_ACCESS_REMOTE_WRITE)); /* without LOCAL_WRITE */
  CHECK_EQUAL(errno, EINVAL);
  struct ibv_qp_init_attr attr = {.send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_UD};
  CHECK(!ibv_create_qp(a.pd, &attr));
  CHECK_EQUAL(errno, EOPNOTSUPP);
  CHECK_EQUAL(post(&a, IBV_WR_RDMA_READ, 1, 8, NULL, 0), EINVAL);
  close_pair(&a, &b);
}

static void test_apple(void) {
  char host[16];
  snprintf(host, sizeof host, "%d", (int)getpid());
  setenv("SOFTVERBS_HOST", host, 1); /* the queue pairs of a device are those of all processes of a host */
  setenv("SOFTVERBS_PROFILE", "apple-tb5", 1);
  size_t page = 16384;
  char *memory = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memory += -(uintptr_t)memory % page;
  struct end end = open_end(memory, page, 4 * DEPTH, 1);
  struct ibv_qp *more[9];
  for (int i = 0; i < 9; i++) CHECK((more[i] = create_qp(&end, 1)), "queue pair %d: %s", i + 2, strerror(errno));
  CHECK(!create_qp(&end, 1), "Apple's device has ten queue pairs");
  CHECK_EQUAL(errno, EBUSY);
  CHECK_EQUAL(ibv_dealloc_pd(end.pd), EBUSY);
  struct address self = address_of(&end);
  to_rts(end.qp, &self);
  end.gid_index = 1;
  struct address other = address_of(&end);
  other.qp_num = more[0]->qp_num;
  to_init(more[0]);
  to_rts(more[0], &other); /* the same end of the cable */
  for (int i = 0; i < 9; i++) CHECK_EQUAL(ibv_destroy_qp(more[i]), 0);
  CHECK_EQUAL(post(&end, IBV_WR_RDMA_WRITE, 1, 8, &self, 0), EINVAL);
  CHECK_EQUAL(post(&end, IBV_WR_SEND_WITH_IMM, 1, 8, NULL, 0), EINVAL);
  close_end(&end);
  end = open_end(memory + sysconf(_SC_PAGESIZE), page, 4 * DEPTH, 1); /* a page as the system has them */
  CHECK(!ibv_reg_mr(end.pd, memory + sysconf(_SC_PAGESIZE) / 2, 8, ACCESS));
  CHECK_EQUAL(errno, EINVAL);
  close_end(&end);
}

static void test_unknown_profile(void) {
  setenv("SOFTVERBS_PROFILE", "no-such-device", 1);
  int count = 1;
  CHECK(!ibv_get_device_list(&count));
  CHECK_EQUAL(errno, EINVAL);
  CHECK_EQUAL(count, 0);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Devices", test_devices},
      {"Addresses", test_addresses},
      {"ConnectedByEitherAddress", test_connected_by_either_address},
      {"LaterQueuePairsByIpv4", test_later_queue_pairs_by_ipv4},
      {"AddressesOfNoOne", test_addresses_of_no_one},
      {"Names", test_names},
      {"Unsignaled", test_unsignaled},
      {"Overrun", test_overrun},
      {"DestroyedWithEvents", test_destroyed_with_events},
      {"References", test_references},
      {"ClosedWithObjectsLeft", test_closed_with_objects_left},
      {"Rejected", test_rejected},
      {"Apple", test_apple},
      {"UnknownProfile", test_unknown_profile},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
