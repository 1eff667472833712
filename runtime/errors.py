"""Errors that a user can mend: one line, where others end in a traceback."""


class UserError(Exception):
  """Something that the user can mend; the message names it and the remedy."""


class SettingError(UserError, ValueError):
  """A flag, a level's name or another value given by the user does not fit."""
