"""A transport over NIXL: one-sided reads and writes by RDMA, GPUDirect, NVLink."""
