"""Every codec keeps the contract of codecs."""

import pytest

from paceline.comm import Codec
from paceline.testing.contracts import CodecContract
from tests.codecs import codec_of


class _Word(CodecContract):
    word: str

    def codec(self) -> Codec:
        return codec_of(self.word)


@pytest.mark.capability("H7")
class TestBf16(_Word):
    word, relative_error = "bf16", 2.0**-8


@pytest.mark.capability("H7")
class TestFp16(_Word):
    word, relative_error = "fp16", 2.0**-11


@pytest.mark.capability("H1", "H2", "H8")
class TestInt8(_Word):
    word, relative_error = "int8", 1 / 254


@pytest.mark.capability("H1", "H2")
class TestInt4(_Word):
    word, relative_error = "int4", 1 / 14


@pytest.mark.capability("H1", "H2")
class TestInt2(_Word):
    word, relative_error = "int2", 1 / 2


@pytest.mark.capability("H1")
class TestStochasticInt8(_Word):
    word, relative_error, draws = "int8:stochastic", 1 / 127, True


@pytest.mark.capability("H1")
class TestStochasticInt4(_Word):
    word, relative_error, draws = "int4:stochastic", 1 / 7, True


@pytest.mark.capability("H1")
class TestStochasticInt2(_Word):
    word, relative_error, draws = "int2:stochastic", 1.0, True


@pytest.mark.capability("H1")
class TestFixed8(_Word):
    word, relative_error = "fixed:8", 2.0**-9


@pytest.mark.capability("H1")
class TestFixed14(_Word):
    word, relative_error = "fixed:14", 2.0**-15 + 2.0**-23


class TestSign(_Word):
    word, relative_error = "sign", 1.0


@pytest.mark.capability("H3", "H8")
class TestTopK(_Word):
    word, relative_error = "topk:0.5", 1.0


@pytest.mark.capability("H3")
class TestTopKThatKeepsAll(_Word):
    word, relative_error = "topk:1.0", 2.0**-24  # of float32


@pytest.mark.capability("H3")
class TestTopKByCount(_Word):
    word, relative_error = "topk:7", 1.0


class TestRandomK(_Word):
    word, relative_error = "randomk:0.3", 1.0


class TestLowRank(_Word):
    word, relative_error = "lowrank:2", 100.0  # of a value; see test_codecs_of_any_tensor.py for the whole


@pytest.mark.capability("H6")
class TestLossless(_Word):
    word, relative_error = "lossless", 0.0


@pytest.mark.capability("H4")
class TestTopKInInt4(_Word):
    word, relative_error = "topk:0.5+int4", 1.0


@pytest.mark.capability("H4")
class TestRandomKInBf16(_Word):
    word, relative_error = "randomk:0.5+bf16", 1.0


@pytest.mark.capability("H4")
class TestTopKInInt2Packed(_Word):
    word, relative_error = "topk:0.5+int2+lossless", 1.0


class TestInt8Packed(_Word):
    word, relative_error = "int8+lossless", 1 / 254
