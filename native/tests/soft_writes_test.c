/* RDMA_WRITE from the inside: peers that lie or stop in the middle, what the owner waits for, and what is reported. */
#define _POSIX_C_SOURCE 200809L
#include "../providers/soft/async.h"
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <errno.h>
#include <sys/socket.h>

#define WRITABLE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)

/* A region of b that its peer may write to. */
static struct ibv_mr *open_to_writes(struct side *b, void *memory, size_t bytes) {
  struct ibv_qp_attr attr = {.qp_access_flags = WRITABLE};
  CHECK_EQUAL(verbs_soft()->modify_qp(b->qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  struct ibv_mr *mr = verbs_soft()->reg_mr(b->pd, memory, bytes, WRITABLE);
  CHECK(mr, "reg_mr: %s", strerror(errno));
  return mr;
}

/* `bytes` of the side's memory to `remote`, and the status of their completion. */
static enum ibv_wc_status write_to(struct side *a, uint64_t remote, uint32_t rkey, uint32_t bytes) {
  struct ibv_sge sge = {(uintptr_t)a->memory, bytes, a->mr->lkey};
  struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma.remote_addr = remote;
  wr.wr.rdma.rkey = rkey;
  CHECK_EQUAL(ibv_post_send(a->qp, &wr, &bad), 0);
  struct ibv_wc wc;
  side_poll(a, &wc, 1);
  return wc.status;
}

/* Memory of the arena and any other. */
static void test_both_memories(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  char other[1000];
  char *places[] = {b.memory + 5, other};
  for (int i = 0; i < 2; i++) {
    struct ibv_mr *mr = open_to_writes(&b, places[i], sizeof other);
    side_fill(a.memory, 900, (unsigned)i);
    CHECK_EQUAL(write_to(&a, (uintptr_t)places[i] + 100, mr->rkey, 900), IBV_WC_SUCCESS);
    side_verify(places[i] + 100, 900, (unsigned)i);
    CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  }
  CHECK_EQUAL(side_counters(&a).bytes_sent, 1800);
  side_close_pair(&a, &b);
}

static void test_gathered(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  struct ibv_mr *mr = open_to_writes(&b, b.memory, 4096);
  side_fill(a.memory, 300, 1);
  struct ibv_sge list[] = {{(uintptr_t)a.memory, 100, a.mr->lkey},
                           {(uintptr_t)a.memory + 100, 0, 0},
                           {(uintptr_t)a.memory + 100, 200, a.mr->lkey}};
  struct ibv_send_wr wr = {.sg_list = list, .num_sge = 3, .opcode = IBV_WR_RDMA_WRITE}, *bad;
  wr.wr.rdma.remote_addr = (uintptr_t)b.memory + 7;
  wr.wr.rdma.rkey = mr->rkey;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
  side_verify(b.memory + 7, 300, 1);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

static void test_faults(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  struct ibv_mr *mr = open_to_writes(&b, b.memory, 4096);
  uint64_t to = (uintptr_t)b.memory;
  a.memory[0] = 1;
  CHECK_EQUAL(verbs_soft()->inject(a.context, "drop_next=1"), 0);
  CHECK_EQUAL(write_to(&a, to, mr->rkey, 1), IBV_WC_SUCCESS);
  CHECK_EQUAL(b.memory[0], 0);
  CHECK_EQUAL(side_counters(&a).dropped_by_fault, 1);
  CHECK_EQUAL(write_to(&a, to, mr->rkey, 1), IBV_WC_SUCCESS);
  CHECK_EQUAL(b.memory[0], 1);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "error_next=1"), 0);
  CHECK_EQUAL(write_to(&a, to, mr->rkey, 1), IBV_WC_GENERAL_ERR);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

/* A write that is counted as begun and does not end. */
static void stop_a_writer(struct side *b) { atomic_fetch_add(&soft_qp(b->qp)->shared->writers, 1); }

static void end_the_writer(struct side *b) {
  atomic_fetch_add(&soft_qp(b->qp)->shared->writers, (UINT64_C(1) << 32) - 1);
}

static void test_region_outlives_its_writer(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  struct ibv_mr *mr = open_to_writes(&b, b.memory, 4096);
  stop_a_writer(&b);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), EBUSY);
  end_the_writer(&b);
  CHECK_EQUAL(write_to(&a, (uintptr_t)b.memory, mr->rkey, 1), IBV_WC_SUCCESS); /* it is withdrawn all the same */
  CHECK_EQUAL(side_counters(&a).dropped, 1);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

static void test_stopped_writer_taints(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  stop_a_writer(&b);
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
  CHECK_EQUAL(verbs_soft()->modify_qp(b.qp, &attr, IBV_QP_STATE), 0);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_INIT, side_address(&a)), EIO);
  end_the_writer(&b);
  side_close_pair(&a, &b);
}

/* What a context of this process published is used as an address here: what stands in the segment, which peers can
 * change, must not count. */
static void test_changed_entry_of_own_process(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  char target[64] = {0}, victim[64] = {0};
  struct ibv_mr *mr = open_to_writes(&b, target, sizeof target);
  struct shared_region *entry = &soft_context(b.context)->segment->layout->regions[mr->handle];
  entry->addr = (uintptr_t)victim;
  a.memory[0] = 1;
  CHECK_EQUAL(write_to(&a, (uintptr_t)victim, mr->rkey, 1), IBV_WC_SUCCESS);
  CHECK_EQUAL(victim[0], 0);
  CHECK_EQUAL(write_to(&a, (uintptr_t)target, mr->rkey, 1), IBV_WC_SUCCESS);
  CHECK_EQUAL(target[0], 1);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

struct invitation {
  struct side_address address;
  uint64_t addr;
  uint32_t rkey;
};

/* Another process, whose entry points past the end of its segment: nothing of this one may be touched. */
static void invite_out_of_bounds(int fd) {
  struct side b;
  struct side_address peer;
  side_open(&b, SIDE_DEFAULTS);
  struct ibv_mr *mr = verbs_soft()->reg_mr(b.pd, b.memory, SIDE_BYTES, WRITABLE);
  CHECK(mr);
  struct shared_region *entry = &soft_context(b.context)->segment->layout->regions[mr->handle];
  struct invitation invitation = {side_address(&b), (uintptr_t)b.memory, mr->rkey};
  CHECK_EQUAL(read(fd, &peer, sizeof peer), sizeof peer);
  side_to_rts(b.qp, peer);
  struct ibv_qp_attr attr = {.qp_access_flags = WRITABLE};
  CHECK_EQUAL(verbs_soft()->modify_qp(b.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  const uint64_t offsets[] = {SEGMENT_BYTES, SEGMENT_BYTES - 1, UINT64_MAX - 1, UINT64_C(1) << 63};
  for (int i = 0; i < 4; i++) {
    entry->offset = offsets[i];
    entry->length = UINT64_MAX;
    CHECK_EQUAL(write(fd, &invitation, sizeof invitation), sizeof invitation);
    char done;
    CHECK_EQUAL(read(fd, &done, 1), 1);
  }
  _exit(0);
}

static void test_lying_process(void) {
  int fds[2];
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  pid_t pid = fork();
  if (pid == 0) {
    alarm(CHECK_SECONDS);
    invite_out_of_bounds(fds[1]);
  }
  struct side a;
  side_open(&a, SIDE_DEFAULTS);
  struct side_address own = side_address(&a);
  CHECK_EQUAL(write(fds[0], &own, sizeof own), sizeof own);
  for (int i = 0; i < 4; i++) {
    struct invitation invitation;
    CHECK_EQUAL(read(fds[0], &invitation, sizeof invitation), sizeof invitation);
    if (i == 0) side_to_rts(a.qp, invitation.address);
    CHECK_EQUAL(write_to(&a, invitation.addr, invitation.rkey, 2), IBV_WC_SUCCESS);
    CHECK_EQUAL(side_counters(&a).dropped, i + 1);
    CHECK_EQUAL(write(fds[0], "", 1), 1);
  }
  CHECK_EQUAL(check_wait(pid), 0);
  close(fds[0]);
  close(fds[1]);
  side_close(&a);
}

static void test_port_events(void) {
  struct ibv_context *context = side_open_device();
  CHECK_EQUAL(context->async_fd, -1); /* who does not ask holds no descriptor */
  CHECK_EQUAL(verbs_soft()->inject(context, "link=down"), 0);
  CHECK_EQUAL(verbs_soft()->inject(context, "link=up"), 0);
  CHECK_EQUAL(soft_async_start(soft_context(context)), 0);
  CHECK_EQUAL(verbs_soft()->inject(context, "link=down"), 0);
  CHECK_EQUAL(verbs_soft()->inject(context, "link=down"), 0); /* it is already */
  CHECK_EQUAL(verbs_soft()->inject(context, "link=up"), 0);
  static const enum ibv_event_type expected[] = {IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE};
  for (int i = 0; i < 2; i++) {
    struct ibv_async_event event;
    CHECK_EQUAL(soft_async_get(soft_context(context), &event), 0);
    CHECK_EQUAL(event.event_type, expected[i]);
    CHECK_EQUAL(event.element.port_num, 1);
  }
  CHECK_EQUAL(verbs_soft()->close_device(context), 0);
}

/* More than the arena has is refused, with those before it posted; all of it comes back with the queue pair. */
static void test_bounces_fill_the_arena(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, side_address(&side)), 0);
  size_t bytes = SEGMENT_BYTES / 4;
  char *memory = malloc(bytes);
  struct ibv_mr *mr = verbs_soft()->reg_mr(side.pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE);
  struct ibv_sge sge = {(uintptr_t)memory, (uint32_t)bytes, mr->lkey};
  struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad = NULL;
  CHECK_EQUAL(ibv_post_recv(side.qp, &wr, &bad), EINVAL); /* until it is requested */
  soft_context(side.context)->bounces = true;
  int posted = 0, error;
  while ((error = ibv_post_recv(side.qp, &wr, &bad)) == 0) posted++;
  CHECK_EQUAL(error, ENOMEM);
  CHECK(bad == &wr && posted == 3, "%d quarters of the segment fitted", posted);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), EBUSY);
  CHECK_EQUAL(verbs_soft()->destroy_qp(side.qp), 0);
  void *all = verbs_soft()->alloc_memory(side.context, 3 * bytes);
  CHECK(all, "bounces were not given back");
  verbs_soft()->free_memory(side.context, all, 3 * bytes);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  free(memory);
  CHECK((side.qp = side_create_qp(&side, SIDE_DEFAULTS)));
  side_close(&side);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"BothMemories", test_both_memories},
      {"Gathered", test_gathered},
      {"Faults", test_faults},
      {"RegionOutlivesItsWriter", test_region_outlives_its_writer},
      {"StoppedWriterTaints", test_stopped_writer_taints},
      {"ChangedEntryOfOwnProcess", test_changed_entry_of_own_process},
      {"LyingProcess", test_lying_process},
      {"PortEvents", test_port_events},
      {"BouncesFillTheArena", test_bounces_fill_the_arena},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
