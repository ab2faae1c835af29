/*
 * RDMA_WRITE: the sender writes into a memory region of its peer, which takes no part in it. Memory of the peer's arena
 * is mapped here, and so is all memory of another context of this process; that of another process is written through
 * the system, where it permits that.
 *
 * On an unreliable connection a key, range or access that is wrong is no error: the message is dropped.
 */
#define _POSIX_C_SOURCE 200809L
#include "write.h"

#include "message.h"
#include "remote.h"

#include <errno.h>
#include <unistd.h>

#define WRITER_ENDED ((UINT64_C(1) << 32) - 1) /* one in progress less, one ended more */

/* Where a message goes. */
struct destination {
  char *memory; /* in this process; or, if NULL, */
  int fd;       /* at `place` of this, */
  off_t place;
};

/* The peer's region, if the message may be written to it; what the peer has published is read once. */
static bool find_region(const struct soft_qp *qp, const struct ibv_send_wr *wr, uint64_t length,
                        struct shared_region *found) {
  const struct soft_remote *remote = &qp->remote;
  const struct shared_region *region = &remote->segment->regions[wr->wr.rdma.rkey % SEGMENT_REGIONS];
  if (!(atomic_load_explicit(&remote->shared->access, memory_order_relaxed) & IBV_ACCESS_REMOTE_WRITE)) return false;
  if (!wr->wr.rdma.rkey || atomic_load(&region->key) != wr->wr.rdma.rkey) return false;
  *found = (struct shared_region){
      .pd = region->pd, .addr = region->addr, .length = region->length, .offset = region->offset};
  if (found->pd != atomic_load_explicit(&remote->shared->pd, memory_order_relaxed)) return false;
  uint64_t within = wr->wr.rdma.remote_addr - found->addr;
  return wr->wr.rdma.remote_addr >= found->addr && length <= found->length && within <= found->length - length;
}

/* Finds where the message goes. Its sender learns by an error if this system does not let it write there. */
static bool find_destination(const struct soft_qp *qp, const struct ibv_send_wr *wr, uint64_t length,
                             struct destination *to, enum ibv_wc_status *status) {
  struct segment *segment = qp->remote.segment;
  struct shared_region region;
  *to = (struct destination){.fd = -1};
  if (!length) return true; /* no key is looked at */
  if (!find_region(qp, wr, length, &region)) return false;
  if (region.offset != REGION_OUTSIDE) {
    uint64_t offset = region.offset + (wr->wr.rdma.remote_addr - region.addr);
    if (offset > SEGMENT_BYTES || length > SEGMENT_BYTES - offset) return false;
    to->memory = (char *)segment->layout + offset;
    return true;
  }
  if (segment->owned) {
    to->memory = (char *)(uintptr_t)wr->wr.rdma.remote_addr;
    return true;
  }
  to->place = (off_t)wr->wr.rdma.remote_addr;
  to->fd = segment_memory(segment);
  if (to->fd >= 0) return true;
  if (errno != ENOENT && errno != ESRCH) *status = IBV_WC_REM_ACCESS_ERR; /* else the peer is dead */
  return false;
}

static bool write_all(int fd, off_t place, const char *from, size_t bytes) {
  while (bytes) {
    ssize_t written = pwrite(fd, from, bytes, place);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    from += written;
    place += written;
    bytes -= (size_t)written;
  }
  return true;
}

static bool copy(const struct destination *to, const struct ibv_send_wr *wr, uint32_t length) {
  if (to->memory) soft_copy_message(to->memory, wr, length);
  if (to->fd < 0) return true;
  off_t place = to->place;
  for (int i = 0; i < wr->num_sge; i++) {
    const struct ibv_sge *sge = &wr->sg_list[i];
    if (!write_all(to->fd, place, (const char *)(uintptr_t)sge->addr, sge->length)) return false;
    place += sge->length;
  }
  return true;
}

/* If the peer's memory was gone, the receive that waits for the immediate data fails with its queue pair. */
static void complete_receive(struct soft_qp *qp, const struct ibv_send_wr *wr, uint64_t position, uint32_t length,
                             bool copied) {
  struct shared_queue_pair *shared = qp->remote.shared;
  struct shared_completion *completion = &shared->completions[position & qp->remote.mask];
  if (!copied) atomic_fetch_or(&shared->claim, CLAIM_CLOSED);
  uint32_t status = copied ? IBV_WC_SUCCESS : IBV_WC_LOC_ACCESS_ERR;
  shared_complete(completion, position, status, length, IBV_WC_WITH_IMM | COMPLETED_BY_WRITE, wr->imm_data);
}

static bool write_message(struct soft_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status) {
  struct destination to;
  bool with_imm = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  uint64_t position = 0, length = soft_message_length(wr);
  if (!find_destination(qp, wr, length, &to, status)) return false;
  if (with_imm && !soft_claim_receive(qp, &position)) return false;
  bool copied = copy(&to, wr, (uint32_t)length);
  if (with_imm) complete_receive(qp, wr, position, (uint32_t)length, copied);
  if (copied) soft_context(qp->verbs.context)->counters.bytes_sent += length;
  return copied;
}

bool soft_write(struct soft_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status) {
  struct soft_remote *remote = &qp->remote;
  struct shared_queue_pair *shared = remote->shared;
  /* Who is not connected any more does not count itself: it could be taken for the one who is. */
  remote->found = soft_find_peer(qp);
  if (!remote->found) return false;
  atomic_fetch_add(&shared->writers, 1);
  bool open = !(atomic_load(&shared->claim) & CLAIM_CLOSED);
  remote->found = open && soft_find_peer(qp);
  bool written = remote->found && write_message(qp, wr, status);
  atomic_fetch_add(&shared->writers, WRITER_ENDED);
  return written;
}
