/* SENDs of a program that knows <infiniband/verbs.h> and no arena: from any memory to any, and what goes wrong. */
#define _GNU_SOURCE
#include "check.h"
#include "softverbs_end.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>

static void exchange(char *from, char *to) {
  struct end a = open_end(from, BYTES, 4 * DEPTH, 1), b = open_end(to, BYTES, 4 * DEPTH, 1);
  join(&a, &b);
  for (unsigned i = 0; i < SIZES; i++) {
    memset(to, 0x55, BYTES);
    fill(from, sizes[i], i);
    CHECK_EQUAL(receive(&b, i, 5, sizes[i] + i), 0); /* not aligned, and longer than the message */
    CHECK_EQUAL(send_bytes(&a, i, sizes[i]), 0);
    struct ibv_wc sent = poll_one(&a, i, IBV_WC_SUCCESS), got = poll_one(&b, i, IBV_WC_SUCCESS);
    CHECK_EQUAL(sent.opcode, IBV_WC_SEND);
    CHECK_EQUAL(got.opcode, IBV_WC_RECV);
    CHECK_EQUAL(got.byte_len, sizes[i]);
    CHECK_EQUAL(got.wc_flags & IBV_WC_WITH_IMM, 0);
    verify(to + 5, sizes[i], i);
    for (size_t k = 0; k < BYTES; k++)
      CHECK(to[k] == 0x55 || (k >= 5 && k < 5 + sizes[i]), "byte %zu is not the receive's", k);
  }
  close_end(&a);
  close_end(&b);
}

static void test_any_memory(void) {
  char *heap = malloc(BYTES), on_stack[BYTES];
  char *mapped = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(heap && mapped != MAP_FAILED);
  exchange(heap, on_stack);
  exchange(on_stack, mapped);
  exchange(mapped, heap);
  munmap(mapped, BYTES);
  free(heap);
}

static void test_immediate(void) {
  struct end a, b;
  open_pair(&a, &b);
  fill(a.memory, 99, 1);
  CHECK_EQUAL(receive(&b, 7, 0, 100), 0);
  CHECK_EQUAL(post(&a, IBV_WR_SEND_WITH_IMM, 8, 99, NULL, 0), 0);
  poll_one(&a, 8, IBV_WC_SUCCESS);
  struct ibv_wc wc = poll_one(&b, 7, IBV_WC_SUCCESS);
  CHECK(wc.wc_flags & IBV_WC_WITH_IMM);
  CHECK_EQUAL(wc.imm_data, IMMEDIATE);
  CHECK_EQUAL(wc.byte_len, 99);
  verify(b.memory, 99, 1);
  close_pair(&a, &b);
}

static void test_receives_stay_in_order(void) {
  struct end a, b;
  open_pair(&a, &b);
  for (unsigned round = 0; round < 20; round++) {
    for (unsigned i = 0; i < DEPTH; i++) CHECK_EQUAL(receive(&b, i, i * 1000, 100 + 100 * ((round + i) % 9)), 0);
    CHECK_EQUAL(receive(&b, 99, 0, 1), ENOMEM);
    for (unsigned i = 0; i < DEPTH; i++) {
      fill(a.memory, 60 + i, round + i);
      CHECK_EQUAL(send_bytes(&a, i, 60 + i), 0);
    }
    for (unsigned i = 0; i < DEPTH; i++) {
      poll_one(&a, i, IBV_WC_SUCCESS);
      CHECK_EQUAL(poll_one(&b, i, IBV_WC_SUCCESS).byte_len, 60 + i);
      verify(b.memory + i * 1000, 60 + i, round + i);
    }
  }
  close_pair(&a, &b);
}

/* As test_receives_stay_in_order, but each receive alone, and its message has one byte. */
static void exchange_one_by_one(size_t first, size_t step, unsigned count, uint32_t depth) {
  size_t bytes = 1 + first + step * count;
  char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  struct end a = open_end(memory, bytes, 4 * DEPTH, 1), b = open_end(memory, bytes, 4 * DEPTH, 1);
  CHECK_EQUAL(ibv_destroy_qp(b.qp), 0);
  struct ibv_qp_init_attr attr = {
      .send_cq = b.cq,
      .recv_cq = b.cq,
      .cap = {.max_send_wr = 1, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1},
      .qp_type = IBV_QPT_UC,
  };
  CHECK((b.qp = ibv_create_qp(b.pd, &attr)));
  to_init(b.qp);
  join(&a, &b);
  for (unsigned i = 0; i < count; i++) {
    *memory = (char)i;
    CHECK_EQUAL(receive(&b, i, 1, first + step * i), 0);
    CHECK_EQUAL(send_bytes(&a, i, 1), 0);
    poll_one(&a, i, IBV_WC_SUCCESS);
    CHECK_EQUAL(poll_one(&b, i, IBV_WC_SUCCESS).byte_len, 1);
    CHECK_EQUAL(memory[1], (char)i);
  }
  close_end(&a);
  close_end(&b);
  munmap(memory, bytes);
}

/* What one receive needed of the 220 MiB is there for the next, also where that is of another size. */
static void test_deep_ring_of_large_receives(void) { exchange_one_by_one((size_t)128 << 10, 0, 2000, 4096); }

static void test_large_receives_of_all_sizes(void) { exchange_one_by_one((size_t)1 << 20, (size_t)1 << 20, 60, 64); }

static void test_no_receive(void) {
  struct end a, b;
  open_pair(&a, &b);
  CHECK_EQUAL(send_bytes(&a, 1, 10), 0);
  poll_one(&a, 1, IBV_WC_SUCCESS); /* and no receive has it */
  CHECK_EQUAL(receive(&b, 2, 0, 10), 0);
  expect_nothing(&b);
  close_pair(&a, &b);
}

static void test_too_long(void) {
  struct end a, b;
  open_pair(&a, &b);
  memset(b.memory, 0x55, BYTES);
  for (unsigned i = 0; i < 3; i++) CHECK_EQUAL(receive(&b, i, 0, 16), 0);
  CHECK_EQUAL(send_bytes(&a, 9, 17), 0);
  poll_one(&a, 9, IBV_WC_SUCCESS);
  poll_one(&b, 0, IBV_WC_LOC_LEN_ERR);
  for (unsigned i = 1; i < 3; i++) poll_one(&b, i, IBV_WC_WR_FLUSH_ERR);
  CHECK_EQUAL(state_of(b.qp), IBV_QPS_ERR);
  CHECK_EQUAL(b.memory[0], 0x55);
  close_pair(&a, &b);
}

static void test_bad_keys(void) {
  struct end a, b;
  open_pair(&a, &b);
  CHECK_EQUAL(receive_at(&b, 1, b.memory, 16, b.mr->lkey + 1), 0);
  CHECK_EQUAL(receive_at(&b, 2, b.memory + BYTES - 8, 16, b.mr->lkey), 0);
  CHECK_EQUAL(send_bytes(&a, 3, 16), 0);
  poll_one(&a, 3, IBV_WC_SUCCESS);
  poll_one(&b, 1, IBV_WC_LOC_PROT_ERR);
  poll_one(&b, 2, IBV_WC_WR_FLUSH_ERR);

  struct ibv_sge sge;
  struct ibv_send_wr wr = request(&a, &sge, IBV_WR_SEND, 4, 16, NULL, 0), *bad;
  sge.lkey++;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
  CHECK_EQUAL(send_bytes(&a, 5, 16), 0);
  poll_one(&a, 4, IBV_WC_LOC_PROT_ERR);
  poll_one(&a, 5, IBV_WC_WR_FLUSH_ERR);
  CHECK_EQUAL(state_of(a.qp), IBV_QPS_ERR);
  close_pair(&a, &b);
}

static void test_flush_in_order(void) {
  struct end a, b;
  open_pair(&a, &b);
  for (unsigned i = 0; i < DEPTH; i++) CHECK_EQUAL(receive(&b, i, 0, 16), 0);
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
  CHECK_EQUAL(ibv_modify_qp(b.qp, &attr, IBV_QP_STATE), 0);
  for (unsigned i = 0; i < DEPTH; i++) poll_one(&b, i, IBV_WC_WR_FLUSH_ERR);
  CHECK_EQUAL(send_bytes(&b, 100, 1), 0);
  poll_one(&b, 100, IBV_WC_WR_FLUSH_ERR);
  close_pair(&a, &b);
}

/* One context, and a queue pair for each thread. */
#define THREADS 2
#define MESSAGES 2000

struct worker {
  pthread_t thread;
  struct end *end;
  struct ibv_cq *cq;
  unsigned number;
};

static void *work(void *of) {
  struct worker *worker = of;
  struct end own = *worker->end;
  char from[64], to[64];
  CHECK((own.cq = ibv_create_cq(own.context, 4 * DEPTH, NULL, NULL, 0)));
  struct ibv_mr *target = ibv_reg_mr(own.pd, to, sizeof to, ACCESS);
  own.memory = from;
  CHECK(target && (own.mr = ibv_reg_mr(own.pd, from, sizeof from, ACCESS)) && (own.qp = create_qp(&own, 1)));
  struct address self = address_of(&own);
  to_init(own.qp);
  to_rts(own.qp, &self); /* to itself */
  for (unsigned i = 0; i < MESSAGES; i++) {
    fill(from, sizeof from, i + worker->number);
    CHECK_EQUAL(receive_at(&own, i, to, sizeof to, target->lkey), 0);
    CHECK_EQUAL(send_bytes(&own, i, sizeof from), 0);
    for (int k = 0; k < 2; k++) poll_one(&own, i, IBV_WC_SUCCESS);
    verify(to, sizeof to, i + worker->number);
  }
  CHECK_EQUAL(ibv_destroy_qp(own.qp), 0);
  CHECK_EQUAL(ibv_dereg_mr(own.mr), 0);
  CHECK_EQUAL(ibv_dereg_mr(target), 0);
  CHECK_EQUAL(ibv_destroy_cq(own.cq), 0);
  return NULL;
}

static void test_threads(void) {
  char *memory = malloc(BYTES);
  struct end end = open_end(memory, BYTES, 4 * DEPTH, 1);
  struct worker workers[THREADS];
  for (unsigned i = 0; i < THREADS; i++) {
    workers[i] = (struct worker){.end = &end, .number = i};
    CHECK_EQUAL(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
  }
  for (unsigned i = 0; i < THREADS; i++) CHECK_EQUAL(pthread_join(workers[i].thread, NULL), 0);
  close_end(&end);
  free(memory);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"AnyMemory", test_any_memory},
      {"Immediate", test_immediate},
      {"ReceivesStayInOrder", test_receives_stay_in_order},
      {"DeepRingOfLargeReceives", test_deep_ring_of_large_receives},
      {"LargeReceivesOfAllSizes", test_large_receives_of_all_sizes},
      {"NoReceive", test_no_receive},
      {"TooLong", test_too_long},
      {"BadKeys", test_bad_keys},
      {"FlushInOrder", test_flush_in_order},
      {"Threads", test_threads},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
