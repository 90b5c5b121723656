"""Source code of sharded models, and of steps that train them."""

# a model, a step of it that can stop at a place, and all of its parameters
SHARDED = """
import time
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
scaler = torch.amp.GradScaler("cpu", enabled=False)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())
def build(kind):
    torch.manual_seed(7)
    net = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    if "tp" in kind:
        for each in net[:2]:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(each, meshes[kind]["tp"], plan)
    if "dp" in kind:
        dp = meshes[kind]["dp"] if kind == "dp tp" else meshes[kind]
        for each in net[:2]: fully_shard(each, mesh=dp)
        fully_shard(net, mesh=dp)
    return net, torch.optim.AdamW(net.parameters(), 1e-2)
def wait_at(place, rank_of_place=1):
    def wait(*_):
        open(f"begun{rank}", "w").close()
        if rank == rank_of_place: time.sleep(60)
    if place == "forward": return net[1].up.register_forward_pre_hook(wait)
    if place == "backward": return net[1].norm.register_full_backward_hook(wait)
    if place == "gradients": return net[1].down.register_full_backward_pre_hook(wait)
def step(net, optimizer, number):
    torch.manual_seed(100 * number + rank)
    optimizer.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
def whole(net):
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [each.detach().clone() for each in values]
"""
MESHES = {
    2: {"dp": "(2,)", "tp": "(2,), mesh_dim_names=('tp',)"},
    4: {
        "dp hybrid": "(2, 2), mesh_dim_names=('replicate', 'shard')",
        "dp tp": "(2, 2), mesh_dim_names=('dp', 'tp')",
    },
}
