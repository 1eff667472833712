"""Tests of envs/spaces.py."""

import gymnasium
from gymnasium import spaces
import numpy as np
import pytest

from envs import spaces as our_spaces


def encode(space, value):
  """Returns the encoder of a space, and what it makes of a value."""
  encoder = our_spaces.Encoder(space)
  arrays = encoder(value)
  frame = arrays[0]
  assert frame.shape == encoder.frame_shape
  assert np.can_cast(frame.dtype, encoder.frame_dtype, 'same_kind')
  return encoder, arrays


def box(low, high, shape, dtype):
  return spaces.Box(low, high, shape, dtype)


class TestImages:
  @pytest.mark.parametrize('channels', [1, 3, 4])
  def test_channels_come_last(self, channels):
    space = box(0, 255, (channels, 6, 8), np.uint8)
    image = space.sample()
    encoder, (frame,) = encode(space, image)
    assert encoder.frame_shape == (6, 8, channels)
    assert encoder.frame_dtype == np.uint8
    np.testing.assert_array_equal(frame, np.transpose(image, [1, 2, 0]))

  @pytest.mark.parametrize('shape', [(6, 8, 3), (3, 3, 3), (3, 8, 2), (6, 8)])
  def test_other_shapes_stay(self, shape):
    space = box(0, 255, shape, np.uint8)
    image = space.sample()
    _, (frame,) = encode(space, image)
    np.testing.assert_array_equal(frame, image)

  @pytest.mark.parametrize('dtype', [np.uint8, np.bool_, np.int64])
  def test_planes_of_two_values_fill_the_range(self, dtype):
    space = box(0, 1, (5, 5, 4), dtype)
    image = space.sample()
    encoder, (frame,) = encode(space, image)
    assert encoder.frame_dtype == np.uint8
    np.testing.assert_array_equal(frame, 255 * image.astype(int))

  def test_values_outside_of_planes_are_refused(self):
    encoder = our_spaces.Encoder(box(0, 1, (5, 5, 4), np.uint8))
    with pytest.raises(ValueError, match='from 0 to 3, but .* 0 to 1'):
      encoder(np.arange(100, dtype=np.uint8).reshape(5, 5, 4) % 4)

  @pytest.mark.parametrize(
    ('low', 'high', 'dtype'),
    [(-1.0, 1.0, np.float32), (0, 10, np.uint8), (-5, 5, np.int16)],
  )
  def test_other_images_are_scaled_by_their_bounds(self, low, high, dtype):
    space = box(low, high, (3, 6, 8), dtype)
    image = np.full((3, 6, 8), low, dtype)
    image[0], image[1] = high, (low + high) / 2
    encoder, (frame,) = encode(space, image)
    assert encoder.frame_dtype == np.float32
    assert [frame[0, 0, c] for c in range(3)] == [1, 0.5, 0]

  def test_bounds_of_each_element(self):
    low, high = np.zeros((6, 8, 2), np.float32), np.ones((6, 8, 2), np.float32)
    high[..., 1] = 4
    space = spaces.Box(low, high)
    _, (frame,) = encode(space, np.ones((6, 8, 2), np.float32))
    assert (frame[..., 0] == 1).all()
    assert (frame[..., 1] == 0.25).all()

  def test_unbounded_images_stay(self):
    space = box(-np.inf, np.inf, (6, 8, 2), np.float32)
    image = space.sample()
    _, (frame,) = encode(space, image)
    np.testing.assert_array_equal(frame, image)


class TestVectors:
  @pytest.mark.parametrize(
    ('value', 'wanted'), [(-2, [1, 0, 0, 0, 0]), (2, [0, 0, 0, 0, 1])]
  )
  def test_discrete_with_a_start(self, value, wanted):
    space = spaces.Discrete(5, start=-2)
    _, (frame,) = encode(space, value)
    assert frame.tolist() == wanted
    # The same inside of others.
    nested = spaces.Tuple([spaces.Dict(a=space), spaces.Discrete(2)])
    _, (frame,) = encode(nested, ({'a': value}, 1))
    assert frame.tolist() == [*wanted, 0, 1]

  def test_discrete_outside_of_its_range(self):
    encoder = our_spaces.Encoder(spaces.Discrete(5))
    for value in (5, -1, 2.5):
      with pytest.raises(ValueError, match=f'shows {value}, but'):
        encoder(value)

  def test_multi_binary(self):
    space = spaces.MultiBinary([5, 4, 5])
    value = space.sample()
    _, (frame,) = encode(space, value)
    np.testing.assert_array_equal(frame, value.reshape(100))

  def test_multi_discrete(self):
    _, (frame,) = encode(spaces.MultiDiscrete([3, 2]), np.array([2, 0]))
    assert frame.tolist() == [0, 0, 1, 1, 0]

  def test_blackjack(self):
    space = gymnasium.make('Blackjack-v1').observation_space
    encoder, _ = encode(space, (20, 10, 1))
    assert encoder.frame_shape == (32 + 11 + 2,)

  def test_matrix_of_numbers(self):
    space = box(-np.inf, np.inf, (5, 7), np.float32)
    value = space.sample()
    _, (frame,) = encode(space, value)
    np.testing.assert_array_equal(frame, value.reshape(35))

  def test_floats_stay_and_integers_are_scaled(self):
    _, (frame,) = encode(box(-2, 2, (2,), np.float64), np.array([-2.0, 2]))
    assert frame.tolist() == [-2, 2]
    _, (frame,) = encode(box(0, 255, (2,), np.uint8), np.uint8([0, 255]))
    assert frame.tolist() == [0, 1]

  def test_a_single_number(self):
    _, (frame,) = encode(box(-1, 1, (), np.float32), np.float32(0.5))
    assert frame.tolist() == [0.5]


class TestParts:
  def test_image_and_numbers_and_text(self):
    space = spaces.Dict(
      image=box(0, 255, (7, 7, 3), np.uint8),
      direction=spaces.Discrete(4),
      variables=box(-np.inf, np.inf, (2,), np.float32),
      mission=spaces.Text(50),
    )
    value = space.sample() | {
      'direction': 2,
      'variables': np.float32([5, 6]),
      'mission': 'go to the door',
    }
    encoder, (frame, instruction, vector) = encode(space, value)
    assert encoder.frame_shape == (7, 7, 3)
    assert encoder.has_instruction
    assert encoder.vector_size == 6
    np.testing.assert_array_equal(frame, value['image'])
    assert (instruction > 0).sum() == 4
    # In the order of the space.
    assert vector.tolist() == [0, 0, 1, 0, 5, 6]

  def test_bytes_are_text_in_utf_8(self):
    space = spaces.Dict(x=box(0, 1, (1,), np.float32), text=spaces.Text(9))
    values = [
      {'x': np.float32([0]), 'text': text}
      for text in ('zur Tür', 'zur Tür'.encode(), 'zur Tor')
    ]
    encoder = our_spaces.Encoder(space)
    first, second, third = (encoder(value)[1].tolist() for value in values)
    assert first == second != third

  @pytest.mark.parametrize(
    ('space', 'message'),
    [
      (box(0, 1, (0, 4), np.float32), 'an axis of length 0'),
      (box(0, 1, (2, 3, 4, 5), np.float32), 'more than three axes'),
      (spaces.Dict(a=box(0, 1, (3, 0), np.float32)), r"\['a'\] Box.* length 0"),
      (spaces.Sequence(spaces.Discrete(2)), 'a fixed size'),
      (spaces.Text(5), 'neither numbers nor an image'),
      (
        spaces.Tuple([box(0, 255, (9, 9, 3), np.uint8)] * 2),
        r'two images, \[0\] and \[1\]',
      ),
      (
        spaces.Dict(a=spaces.Text(5), b=spaces.Text(5), c=spaces.Discrete(2)),
        r"two texts, \['a'\] and \['b'\]",
      ),
    ],
  )
  def test_refuses_by_name(self, space, message):
    with pytest.raises(our_spaces.UnsupportedSpaceError, match=message) as e:
      our_spaces.Encoder(space)
    assert '\n' not in str(e.value)

  def test_missing_part(self):
    encoder = our_spaces.Encoder(spaces.Dict(a=spaces.Discrete(2)))
    with pytest.raises(ValueError, match=r"lacks \['a'\]"):
      encoder({'b': 1})
