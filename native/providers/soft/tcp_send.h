/* The sending half of a queue pair. */
#pragma once

#include "tcp.h"

bool soft_tcp_must_wait(const struct soft_qp* qp); /* for the connection, or until the system takes more */
bool soft_tcp_has_begun(const struct soft_qp* qp); /* the first SEND that has not left */
/* Begins to send; again for the same SEND: once more. false: it is dropped, as there is no connection. */
bool soft_tcp_begin(struct soft_qp* qp, const struct ibv_send_wr* wr, unsigned faults);
/* Writes what the system takes. false: something is left. */
bool soft_tcp_write(struct soft_qp* qp, const struct ibv_send_wr* wr);
void tcp_sender_connect(struct soft_qp* qp, uint64_t now);
void tcp_sender_close(struct tcp_sender* sender);
short tcp_sender_events(const struct tcp_sender* sender);
void tcp_sender_progress(struct soft_qp* qp, short events, uint64_t now);
