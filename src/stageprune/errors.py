"""Every error that stageprune raises on purpose: one class for each thing a caller may want to catch."""


class StagePruneError(Exception):
    """Base class of all errors raised by stageprune."""


class SettingError(StagePruneError, ValueError):
    """A setting has the wrong type or value; the message says which, and what would be right."""


class ModelLoadError(StagePruneError):
    """A model or tokenizer could not be loaded."""


class UnsupportedModelError(StagePruneError):
    """The model's architecture cannot be pruned by this method; the message names the layer and the reason."""


class AlreadyPrunedError(StagePruneError):
    """The model already carries a stageprune handle; remove that one first."""


class StageError(StagePruneError):
    """A forward pass was asked for something its stage cannot give, such as logits of pruned positions."""


class PromptError(StagePruneError, ValueError):
    """A prompt is empty, or longer than the model's context."""


class DataError(StagePruneError):
    """Calibration data cannot be read or used; the message names the file, the line and what is wrong."""


class ResultFileError(StagePruneError):
    """A result file cannot be read: it is damaged, of another kind or version, or of other settings."""


class NumericsError(StagePruneError):
    """A computation overflowed; the message says what to change."""


class ServingError(StagePruneError):
    """A server cannot be started; the message says what is missing or taken."""
