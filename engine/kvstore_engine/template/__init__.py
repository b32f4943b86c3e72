"""A model's chat template: the inputs it reads, and the prompt that it makes of a conversation."""

from kvstore_engine.template.chat_template import MAY_BE_BARE, ChatTemplate
from kvstore_engine.template.environment import Message, TemplateError

__all__ = ["MAY_BE_BARE", "ChatTemplate", "Message", "TemplateError"]
