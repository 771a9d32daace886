"""Run by test_graph.py under torchrun: each rank holds half of the packed rows as a sharded DTensor."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import monograph as mg

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
w = mg.quantize(torch.randn(64, 128))
mesh = init_device_mesh("cpu", (2,))
values = distribute_tensor(w.values, mesh, [Shard(0)]).to_local()
scales = distribute_tensor(w.scales[0], mesh, [Shard(0)]).to_local()


@torch.compile(fullgraph=True)
def local_rows(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.ops.monograph.dequantize(values, [scales], [1, 64, values.shape[0], 128], torch.float32)


parts = [torch.empty(32, 128) for _ in range(2)]
dist.all_gather(parts, local_rows(values, scales))
assert torch.equal(torch.cat(parts), w.dequantize(torch.float32))
print("ranks agree", flush=True)
dist.destroy_process_group()
