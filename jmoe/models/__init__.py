"""A decoder on jmoe's modules."""

from jmoe.models.config import DecoderConfig
from jmoe.models.decoder import Decoder, evaluate

__all__ = ["Decoder", "DecoderConfig", "evaluate"]
