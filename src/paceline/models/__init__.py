"""Small reference models: plain `nn.Module`s that never know how they are distributed."""

from paceline.models.chunked_cross_entropy import chunked_cross_entropy
from paceline.models.convnet import ConvNet
from paceline.models.dropout import KeyedDropout, LayerDrop, name_dropouts, set_micro_batch_key
from paceline.models.early_exit import EarlyExitResult, evaluate_early_exit
from paceline.models.fused_operations import FORMS, OPERATIONS, FusedOperation, FusedOperations
from paceline.models.gpt import GPT, GPT_TENSOR_PLAN, GPTConfig, gpt_chain, initialize_gpt
from paceline.models.initialize import InitializeByName, fan_in_rule, initialize_by_name, without_memory
from paceline.models.mlp import MLP
from paceline.models.positions import positions
from paceline.models.tensor_plans import TENSOR_PLANS, tensor_plan_of
from paceline.models.text_generation import generate, sample_token

__all__ = [
    "FORMS",
    "GPT",
    "GPT_TENSOR_PLAN",
    "MLP",
    "OPERATIONS",
    "TENSOR_PLANS",
    "ConvNet",
    "EarlyExitResult",
    "FusedOperation",
    "FusedOperations",
    "GPTConfig",
    "InitializeByName",
    "KeyedDropout",
    "LayerDrop",
    "chunked_cross_entropy",
    "evaluate_early_exit",
    "fan_in_rule",
    "generate",
    "gpt_chain",
    "initialize_by_name",
    "initialize_gpt",
    "name_dropouts",
    "positions",
    "sample_token",
    "set_micro_batch_key",
    "tensor_plan_of",
    "without_memory",
]
