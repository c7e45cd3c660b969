"""The settings of the built-in rankers. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipeline.config.fields import setting
from pipeline.config.model import ModelConfig
from pipeline.core.errors import ConfigError

NORMS = ("none", "batch", "layer")


@dataclass(kw_only=True)
class RankerConfig(ModelConfig):
    """What every built-in ranker has: an MLP that leads to the logit."""

    top_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="Hidden widths of the MLP that leads to the logit; a last layer of width 1 follows.",
    )
    dropout: float = setting(
        0.0,
        low=0.0,
        high=0.95,
        quiet=True,
        doc="Probability with which training sets a value of the hidden layers that lead to the logit to zero.",
    )
    norm: str = setting(
        "none",
        choices=NORMS,
        quiet=True,
        doc="Normalisation of the hidden layers that lead to the logit, before ReLU. batch takes mean and variance "
        "over the global batch, of all ranks, and running ones in evaluation; layer takes them over a sample's values.",
    )

    @property
    def batch_statistics(self) -> bool:
        """See ``ModelConfig.batch_statistics``."""
        return self.norm == "batch"

    def check(self, path: str) -> None:
        """Raise ConfigError for a layer without width."""
        super().check(path)
        # In rankers' settings, lists of numbers are widths; lists of names, such as gates, are not checked.
        for each in fields(self):
            widths = getattr(self, each.name)
            if isinstance(widths, list) and any(isinstance(width, int) and width < 1 for width in widths):
                raise ConfigError(
                    f"{path}.{each.name} is {widths}, expected widths of at least 1",
                    hint=f"{path}.{each.name}=[512,256]",
                )


@dataclass(kw_only=True)
class VectorRankerConfig(RankerConfig):
    """What rankers have that take the numeric features as vectors beside the embeddings."""

    bottom_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="Hidden widths of the MLP on the numeric features; a last layer as wide as an embedding follows.",
    )


@dataclass(kw_only=True)
class DlrmConfig(VectorRankerConfig):
    """DLRM: bottom MLP on the dense features, dot products of all pairs of vectors, top MLP."""

    name: str = setting("dlrm", choices=("dlrm",), doc="Ranking model to train.")
    drop_pairs: list[list[str]] = setting(
        factory=list,
        quiet=True,
        doc="Pairs of features whose dot product is left out, as [[C1,C2],[C1,C3]]. Pairs with the numeric features "
        "stay: there a feature acts by itself.",
    )

    def check(self, path: str) -> None:
        """Raise ConfigError for a pair to drop that is not a pair of two features."""
        super().check(path)
        # ``dlrm.numbered_pairs`` checks that the features exist, because the vectors are not known here.
        for pair in self.drop_pairs:
            if len(pair) != 2 or pair[0] == pair[1]:
                raise ConfigError(
                    f"{path}.drop_pairs has [{', '.join(pair)}], expected two different features",
                    hint=f"{path}.drop_pairs=[[C1,C2],[C1,C3]]",
                )


@dataclass(kw_only=True)
class DcnV2Config(RankerConfig):
    """DCN-V2: cross layers x <- x0 * f(x) + x on everything side by side, before or beside an MLP."""

    name: str = setting("dcnv2", choices=("dcnv2",), doc="Ranking model to train.")
    cross: str = setting(
        "full",
        choices=("full", "low_rank", "mixture"),
        doc="What a cross layer multiplies by: a whole matrix, one of rank `cross_rank`, or a mixture of such experts.",
    )
    cross_layers: int = setting(3, low=1, high=16, doc="Number of cross layers, one after the other.")
    cross_rank: int = setting(64, low=1, doc="Rank of cross layers that have no whole matrix.")
    cross_experts: int = setting(4, low=1, high=64, doc="Number of experts in a mixture.")
    cross_structure: str = setting(
        "stacked",
        choices=("stacked", "parallel"),
        doc="Whether parts follow each other, or stand side by side and are joined before the last layers.",
    )


@dataclass(kw_only=True)
class DeepFmConfig(VectorRankerConfig):
    """DeepFM: a factorisation machine and an MLP over the same embeddings."""

    name: str = setting("deepfm", choices=("deepfm",), doc="Ranking model to train.")


@dataclass(kw_only=True)
class WideDeepConfig(RankerConfig):
    """Wide & Deep: a sparse linear layer on ids and normalised numbers, beside an MLP on everything.

    Crosses of features are ids of their own: `data.sparse.<name>.cross`.
    """

    name: str = setting("wide_deep", choices=("wide_deep",), doc="Ranking model to train.")
    wide: int = setting(
        1,
        low=1,
        doc="Outputs of the sparse linear layer: so many first values of an embedding are its weights.",
    )

    def check(self, path: str) -> None:
        """Also check that something of an embedding is left for the MLP."""
        super().check(path)
        if self.wide >= self.embedding_dim:
            raise ConfigError(
                f"{path}.wide is {self.wide}, expected less than {path}.embedding_dim={self.embedding_dim}",
                hint=f"{path}.wide=1",
            )


@dataclass(kw_only=True)
class FinalMlpConfig(RankerConfig):
    """FinalMLP: two MLPs, each behind a gate on its inputs, fused by a bilinear form. `top_mlp` is the first one."""

    name: str = setting("finalmlp", choices=("finalmlp",), doc="Ranking model to train.")
    second_mlp: list[int] = setting(
        factory=lambda: [512, 256], doc="Hidden widths of the second stream's MLP; `top_mlp` has the first one's."
    )
    gate_hidden: int = setting(64, low=1, doc="Width of the hidden layer of a gate on the inputs.")
    first_gate: list[str] = setting(
        factory=list,
        doc="Sparse features that decide the gate of the first stream; none: it is learnt, the same for all samples.",
    )
    second_gate: list[str] = setting(
        factory=list,
        doc="Sparse features that decide the gate of the second stream; none: it is learnt, the same for all samples.",
    )
    heads: int = setting(4, low=1, doc="Number of heads that vectors are cut into, each with products of its own.")

    def check(self, path: str) -> None:
        """Also check that the heads divide both streams' last widths."""
        super().check(path)
        for name, widths in (("top_mlp", self.top_mlp), ("second_mlp", self.second_mlp)):
            if not widths:
                raise ConfigError(f"{path}.{name} is [], expected a layer at least", hint=f"{path}.{name}=[256]")
            if widths[-1] % self.heads:
                raise ConfigError(
                    f"{path}.{name} ends with {widths[-1]}, expected a multiple of {path}.heads={self.heads}",
                    hint=f"{path}.heads=1",
                )


@dataclass(kw_only=True)
class MaskNetConfig(VectorRankerConfig):
    """MaskNet: blocks that multiply by a mask which the whole sample decides, in series or side by side."""

    name: str = setting("masknet", choices=("masknet",), doc="Ranking model to train.")
    block_structure: str = setting(
        "parallel",
        choices=("serial", "parallel"),
        doc="Whether parts follow each other, or stand side by side and are joined before the last layers.",
    )
    blocks: int = setting(3, low=1, high=64, doc="Number of mask blocks.")
    block_width: int = setting(128, low=1, doc="Width of what a mask block puts out.")
    mask_width: int = setting(128, low=1, doc="Width of the hidden layer that computes a mask.")


@dataclass(kw_only=True)
class DhenConfig(VectorRankerConfig):
    """DHEN: layers that let several interaction modules look at the same vectors, and join what they give."""

    name: str = setting("dhen", choices=("dhen",), doc="Ranking model to train.")
    layers: int = setting(2, low=1, high=32, doc="Number of layers of interactions, one after the other.")
    modules: list[str] = setting(
        factory=lambda: ["dot", "cross"],
        choices=("dot", "attention", "convolution", "linear", "cross"),
        doc="Interaction modules of every layer.",
    )
    ensemble: str = setting(
        "concat",
        choices=("concat", "sum", "weighted_sum"),
        doc="How a layer joins what its modules give: side by side, added up, or added up by learnt weights.",
    )
    module_vectors: int = setting(16, low=1, doc="Number of vectors that a module puts out.")
    cross_rank: int = setting(64, low=1, doc="Rank of cross layers that have no whole matrix.")
    heads: int = setting(4, low=1, doc="Number of heads that vectors are cut into, each with products of its own.")
    channels: int = setting(8, low=1, doc="Channels of the convolution.")

    def check(self, path: str) -> None:
        """Also check that there is a module."""
        super().check(path)
        if not self.modules:
            raise ConfigError(f"{path}.modules is [], expected a module at least", hint=f"{path}.modules=[dot,cross]")
        if "attention" in self.modules:
            check_heads(path, self.heads, self.embedding_dim)


@dataclass(kw_only=True)
class WukongConfig(VectorRankerConfig):
    """Wukong: layers of factorisation machines, whose products feed an MLP, beside linear sums of the vectors."""

    name: str = setting("wukong", choices=("wukong",), doc="Ranking model to train.")
    layers: int = setting(2, low=1, high=32, doc="Number of layers of interactions, one after the other.")
    products: int = setting(
        8,
        low=1,
        doc="Number of sums of all vectors that the factorisation machine of a layer multiplies every vector with.",
    )
    products_mlp: list[int] = setting(factory=lambda: [128], doc="Hidden widths of the MLP on the products of a layer.")
    product_vectors: int = setting(8, low=1, doc="Number of vectors that the MLP on the products of a layer puts out.")
    linear_vectors: int = setting(
        8, low=1, doc="Number of linear sums of its vectors that a layer has beside the products."
    )


@dataclass(kw_only=True)
class MlpConfig(RankerConfig):
    """One MLP on the dense features and all embeddings, side by side."""

    name: str = setting("mlp", choices=("mlp",), doc="Ranking model to train.")


def check_heads(path: str, heads: int, width: int) -> None:
    """Check that ``heads`` divide vectors of ``width``; ``path`` is that of the model's settings.

    Raises:
        ConfigError: The heads do not divide the width.
    """
    if width % heads:
        raise ConfigError(
            f"{path}.heads is {heads}, expected a divisor of the vectors' width {width}",
            hint=f"{path}.heads=1",
        )
