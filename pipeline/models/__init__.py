"""Ranking models: ``SPECS`` lists the built-in ones. No torch at import."""

from pipeline.models.rankers import DCNV2, DEEPFM, DHEN, DLRM, FINALMLP, MASKNET, MLP, WIDE_DEEP, WUKONG

SPECS = (DLRM, DCNV2, DEEPFM, WIDE_DEEP, FINALMLP, MASKNET, DHEN, WUKONG, MLP)
