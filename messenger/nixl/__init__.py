"""A transport over NIXL: one-sided reads by RDMA."""
